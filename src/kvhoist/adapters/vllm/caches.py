"""The cache group that kvhoist serves, read off the tensors that vLLM registers, whatever attention backend made them.

vLLM hands over one tensor a layer, in the backend's own axes. Only two of them mean something here: the block axis,
and an axis of K and V that spans all blocks. The rest of a block is the backend's business and is copied whole, in the
order in which it lies in memory:

| tensors | who | components |
| --- | --- | --- |
| (2, blocks, ...), planes apart | vLLM 0.20: FlashAttention, FlexAttention, CPU, ROCm | `k`, `v` |
| (2, blocks, ...), K by V in a block | 0.20: models with state layers; one tensor for all layers | `block` |
| (blocks, 2, ...), (blocks, tokens, heads, dim) | 0.20: FlashInfer, Triton; TurboQuant, K and V that differ | `block` |
| (blocks, tokens, latent) | MLA, fp8_ds_mla; DSA's indexer, a component of its own | `block` |
| (blocks, heads, tokens, content), any KVCacheLayout | 0.32: all backends | `block` |

A tensor may hold several kernel blocks for each of vLLM's, pages may be padded, and a block may be cut into pieces that
stand apart at one pitch (heads outside of the blocks, layers between the heads): the pieces are a row's parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvhoist.adapters.vllm.block_form import BlockForm, block_form
from kvhoist.checks import count
from kvhoist.device_layout import DeviceCache, check_disjoint
from kvhoist.device_layout.tensors import TensorBytes, read_tensor, spans
from kvhoist.errors import KvhoistError, LayoutError
from kvhoist.geometry import CacheGroup, Component
from kvhoist.layout import ComponentLayout, Layout, Place, Unit
from kvhoist.platform.base import Device, MemoryRegion

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class RegisteredCaches:
    """The layers of one KV cache group of vLLM as kvhoist moves them.

    `block_order` names the order of the bytes inside the blocks of each component: backend, dtype, shape and strides,
    for the namespace; no address or number of blocks enters it. `layer_of` maps each of vLLM's layer names to the layer
    that `Transfer.wait` takes; a layer that shares another's cache waits for that one.
    """

    group: CacheGroup
    device: DeviceCache
    block_order: str
    layer_of: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    index: int
    tensor: TensorBytes
    form: BlockForm

    @property
    def stem(self) -> str:
        """The name with `*` for its numbers: what layers of one kind have in common."""
        return ".".join("*" if part.isdigit() else part for part in self.name.split("."))

    @property
    def place(self) -> tuple[int, ...]:
        """The bytes that the layer's blocks occupy."""
        form = self.form
        strides = (form.plane_stride_bytes, form.unit_stride_bytes, form.part_stride_bytes)
        return (self.tensor.address, len(form.names), *strides, form.num_parts, form.part_bytes)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers of one stem and form, each index once: one component, or two where there are planes."""

    stem: str
    form: BlockForm
    layers: tuple[_Layer, ...]

    def names(self, suffix: str) -> tuple[str, ...]:
        return tuple(name + suffix for name in self.form.names)


def read_kv_caches(
    kv_caches: Mapping[str, Any],
    layer_names: Sequence[str],
    layer_index: Callable[[str], int],
    *,
    num_blocks: int,
    block_tokens: int,
    blocks_per_page: int,
    block_dim: Callable[[str, Any], int],
    backend_of: Callable[[str], str],
) -> RegisteredCaches:
    """Describe the layers `layer_names` of what `register_kv_caches` got; other layers in `kv_caches` are left alone.

    `num_blocks` and `block_tokens` are vLLM's own (the scheduler's ids, not the kernels'). `block_dim` says which axis
    of a layer's tensor counts the blocks. `backend_of` must name all that determines the order inside a block and is
    not seen in shape and strides: the backend, and its variant where it has several.

    One kind of layer gives `block`, or `k` and `v`. Layers whose blocks differ (in bytes, order, dtype or backend), and
    caches beside the attention's own (an indexer, a draft model), are further components, named by what their layer
    names add: `block.indexer.k_cache`, or by a number where that is nothing. The kind with the most layers comes first.

    Nothing is copied; the regions own the tensors. Raises LayoutError or GeometryError, which name the layer, for one
    that is missing, whose number of blocks does not fit, whose blocks' bytes lie in no regular order, or that overlaps
    another.
    """
    count("num_blocks", num_blocks, least=1)
    count("block_tokens", block_tokens, least=1)
    if not layer_names:
        raise LayoutError("there are no layers to serve", expected="the layer names of one KV cache group")
    found = []
    for name in dict.fromkeys(layer_names):
        tensor = _read_tensor(kv_caches, name)
        dim = _ask(name, "which axis counts its blocks", block_dim, name, kv_caches[name])
        backend = _ask(name, "its attention backend", backend_of, name)
        form = block_form(tensor, dim, num_blocks, block_tokens, backend)
        found.append(_Layer(name, _index(name, layer_index), tensor, form))
    device = _one_device(found)
    owners: dict[tuple[int, ...], _Layer] = {}
    layer_of = {}
    for layer in sorted(found, key=lambda layer: (layer.index, layer.name)):
        layer_of[layer.name] = owners.setdefault(layer.place, layer).index
    named = _named(_kinds(list(owners.values())))
    group = CacheGroup(
        tuple(
            Component(name, tuple(layer.index for layer in kind.layers), kind.form.row_bytes, block_tokens)
            for suffix, kind in named
            for name in kind.names(suffix)
        ),
        block_tokens * blocks_per_page,
        blocks_per_page,
    )
    layout, regions = _layout(group, named, num_blocks, device, tuple(kv_caches[layer.name] for layer in found))
    order = "; ".join(f"{' '.join(kind.names(suffix))}: {kind.form.order}" for suffix, kind in named)
    return RegisteredCaches(group, DeviceCache(layout, regions, device), order, layer_of)


def _read_tensor(kv_caches: Mapping[str, Any], name: str) -> TensorBytes:
    if name not in kv_caches:
        raise LayoutError(
            f"vLLM registered no KV cache for layer {name!r}",
            got=f"{len(kv_caches)} layers, such as {sorted(kv_caches)[:3]}",
            expected="all layers of the KV cache group",
        )
    return read_tensor(kv_caches[name], f"of layer {name!r}")


def _ask(name: str, what: str, ask: Callable[..., _Answer], *arguments: Any) -> _Answer:
    """Return what vLLM answers about a layer. Its own code may raise anything: that becomes a LayoutError."""
    try:
        return ask(*arguments)
    except KvhoistError:
        raise
    except Exception as error:
        raise LayoutError(
            f"layer {name!r} cannot be described: vLLM does not tell {what}", got=f"{type(error).__name__}: {error}"
        ) from error


def _index(name: str, layer_index: Callable[[str], int]) -> int:
    index = _ask(name, "its index", layer_index, name)
    if not isinstance(index, int) or index < 0:
        raise LayoutError(f"layer {name!r} has no index", got=repr(index), expected="an int from 0 on")
    return index


def _one_device(layers: list[_Layer]) -> Device:
    first = layers[0].tensor.device
    for layer in layers:
        if layer.tensor.device != first:
            raise layer.tensor.error("lies elsewhere", got=layer.tensor.device, expected=f"{first}, as the others")
    return first


def _kinds(layers: list[_Layer]) -> list[_Kind]:
    """Sort `layers`, ascending by index, into kinds: the one with the most layers first, then the largest blocks."""
    kinds: dict[tuple[str, BlockForm, int], list[_Layer]] = {}
    seen: Counter[tuple[str, BlockForm, int]] = Counter()
    for layer in layers:
        seen[layer.stem, layer.form, layer.index] += 1
        kinds.setdefault((layer.stem, layer.form, seen[layer.stem, layer.form, layer.index]), []).append(layer)

    def rank(item: tuple[tuple[str, BlockForm, int], list[_Layer]]) -> tuple[Any, ...]:
        (stem, form, occurrence), members = item
        block_bytes = form.row_bytes * len(form.names)
        return -len(members), -block_bytes, stem, form.order, occurrence, members[0].index

    return [_Kind(stem, form, tuple(members)) for (stem, form, _), members in sorted(kinds.items(), key=rank)]


def _named(kinds: list[_Kind]) -> list[tuple[str, _Kind]]:
    """Give each kind the suffix of its components' names: none for the first."""
    first = kinds[0].stem.split(".")
    named: dict[str, _Kind] = {}
    for number, kind in enumerate(kinds, start=1):
        suffix = "".join(f".{part}" for part in _added(kind.stem.split("."), first)) or f".{number}"
        if number == 1:
            suffix = ""
        elif suffix in named:
            suffix = f"{suffix}.{number}"
        named[suffix] = kind
    return list(named.items())


def _added(parts: list[str], first: list[str]) -> list[str]:
    """Return what is left of `parts` without the beginning and then the end that it shares with `first`."""
    for _ in range(2):
        shared = next((i for i, (a, b) in enumerate(zip(first, parts, strict=False)) if a != b), len(first))
        first, parts = first[shared:][::-1], parts[shared:][::-1]
    return parts


def _layout(
    group: CacheGroup, named: list[tuple[str, _Kind]], num_blocks: int, device: Device, owner: tuple[Any, ...]
) -> tuple[Layout, tuple[MemoryRegion, ...]]:
    storages = spans([layer.tensor for _, kind in named for layer in kind.layers])
    components = []
    for suffix, kind in named:
        form = kind.form
        for plane, name in enumerate(kind.names(suffix)):
            addresses = [layer.tensor.address + plane * form.plane_stride_bytes for layer in kind.layers]
            places = tuple(_place(address, storages) for address in addresses)
            row = (form.row_bytes, 1, form.part_bytes, form.num_parts, form.part_stride_bytes)
            components.append(ComponentLayout(name, places, form.unit_stride_bytes, *row))
    sizes = tuple(end - start for start, end in storages)
    try:
        layout = Layout("vLLM's KV cache", group, Unit.BLOCK, num_blocks, sizes, tuple(components))
        check_disjoint(layout)
    except LayoutError as error:
        layers = {name: kind.stem for suffix, kind in named for name in kind.names(suffix)}
        raise LayoutError(
            "the KV caches that vLLM registered cannot hold their layers",
            got=str(error),
            expected="every byte of every layer in a place of its own",
            remedy=f"The layers of each component: {layers}.",
        ) from error
    return layout, tuple(MemoryRegion(start, end - start, device, owner) for start, end in storages)


def _place(address: int, storages: list[tuple[int, int]]) -> Place:
    buffer = next(i for i, (start, end) in enumerate(storages) if start <= address < end)
    return Place(buffer, address - storages[buffer][0])
