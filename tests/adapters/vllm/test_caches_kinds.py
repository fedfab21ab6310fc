"""Layers of several kinds, layers that share a cache, and what cannot be described: said by the layer's name."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_cache_views import Memory, Spec, check_round_trip, host_page, index_of, move_out, read

from kvhoist.adapters.vllm.caches import RegisteredCaches, read_kv_caches
from kvhoist.errors import GeometryError, LayoutError
from kvhoist.layout import HostOrder

BLOCKS, TOKENS = 5, 4
PAGES = {"block": BLOCKS, "head": 2, "token": TOKENS, "content": 6}
WIDE = PAGES | {"head": 3}
ORDER = "layer block head token content"


def names(*indices: int, stem: str = "model.layers.{}.self_attn.attn") -> tuple[str, ...]:
    return tuple(stem.format(index) for index in indices)


TARGET = names(0, 1, 2)
DRAFT = names(0, stem="draft_model.layers.{}.self_attn.attn")


def check(specs: Sequence[Spec], owners: dict[str, Sequence[str]]) -> RegisteredCaches:
    """Assert the components, their layers, the bytes of a host page, and the round trip; return what was read."""
    memory = Memory(specs, 1)
    caches = read(memory, block_tokens=TOKENS)
    layers = {c.name: c.layers for c in caches.group.components}
    assert layers == {name: tuple(index_of(layer) for layer in held) for name, held in owners.items()}
    _, array = move_out(caches, [3, 1], HostOrder.PAGE_FIRST_DIRECT)
    assert array[: caches.group.page_bytes].tobytes() == host_page(memory, caches, owners, [3])
    check_round_trip(memory, caches, [3, 1], [0, 3], [layer for spec in specs for layer in spec.layers])
    return caches


def test_layers_whose_blocks_differ_in_bytes_are_components_of_their_own() -> None:
    caches = check(
        [Spec(PAGES, ORDER, layers=names(0, 2, 4)), Spec(WIDE, ORDER, layers=names(1, 3))],
        {"block": names(0, 2, 4), "block.2": names(1, 3)},
    )
    assert (
        caches.block_order == "block: BACKEND bfloat16 b1x2x4x6/0,24,6,1; block.2: BACKEND bfloat16 b1x3x4x6/0,24,6,1"
    )


def test_layers_of_two_dtypes_of_one_width_are_not_mixed_up() -> None:
    """Else two models that differ only in which layers are fp8 would share pages."""
    caches = check(
        [Spec(PAGES, ORDER, "float8_e4m3fn", names(0, 1)), Spec(PAGES, ORDER, "int8", names(2))],
        {"block": names(0, 1), "block.2": names(2)},
    )
    assert (
        caches.block_order == "block: BACKEND float8_e4m3fn b1x2x4x6/0,24,6,1; block.2: BACKEND int8 b1x2x4x6/0,24,6,1"
    )


def test_a_draft_models_layer_of_the_same_index_is_a_component_of_its_own() -> None:
    caches = check(
        [Spec(PAGES, ORDER, layers=TARGET), Spec(WIDE, ORDER, layers=DRAFT)],
        {"block": TARGET, "block.draft_model": DRAFT},
    )
    assert caches.layer_of[DRAFT[0]] == caches.layer_of[TARGET[0]] == 0
    check(
        [Spec(PAGES, ORDER, layers=TARGET), Spec(PAGES, ORDER, layers=DRAFT)],
        {"block": TARGET, "block.draft_model": DRAFT},
    )


def test_two_caches_of_one_layer_under_one_name_are_two_components() -> None:
    twice = names(0, stem="model.layers.{}.self_attn.0.attn") + names(0, stem="model.layers.{}.self_attn.1.attn")
    check([Spec(PAGES, ORDER, layers=twice)], {"block": twice[:1], "block.2": twice[1:]})


def test_of_as_many_layers_the_larger_blocks_are_the_models_own() -> None:
    """Whatever the names: DeepSeek's latent is called mla_attn in some releases, its indexer stays k_cache."""
    latents = names(0, 1, stem="model.layers.{}.self_attn.mla_attn")
    indexers = names(0, 1, stem="model.layers.{}.self_attn.indexer.k_cache")
    check(
        [Spec(PAGES, ORDER, layers=indexers), Spec(WIDE, ORDER, layers=latents)],
        {"block": latents, "block.indexer.k_cache": indexers},
    )


def test_planes_and_blocks_in_one_group() -> None:
    planes = {"kv": 2, "block": BLOCKS, "token": TOKENS, "head": 2, "dim": 8}
    check(
        [Spec(planes, "layer kv block token head dim", layers=TARGET), Spec(PAGES, ORDER, layers=DRAFT)],
        {"k": TARGET, "v": TARGET, "block.draft_model": DRAFT},
    )
    check(
        [Spec(PAGES, ORDER, layers=TARGET), Spec(planes, "layer kv block token head dim", layers=DRAFT)],
        {"block": TARGET, "k.draft_model": DRAFT, "v.draft_model": DRAFT},
    )


def test_k_and_v_of_a_cache_of_one_block_are_planes_too() -> None:
    planes = {"kv": 2, "block": 1, "token": TOKENS, "head": 2, "dim": 8}
    caches = read(Memory([Spec(planes, "layer kv block token head dim", layers=TARGET)], 1), block_tokens=TOKENS)
    assert [component.name for component in caches.group.components] == ["k", "v"]


def test_neither_the_order_of_the_layers_nor_the_run_changes_what_is_read() -> None:
    specs = [
        Spec(PAGES, ORDER, layers=names(*range(6), 10)),
        Spec(WIDE, ORDER, layers=names(7, 9, 8)),
        Spec(PAGES, ORDER, "uint8", names(0, 3, stem="model.layers.{}.self_attn.indexer.k_cache")),
    ]
    first = read(Memory(specs, 1), block_tokens=TOKENS)
    for seed in range(5):
        mixed = [replace(spec, layers=random.Random(seed).sample(spec.layers, len(spec.layers))) for spec in specs]
        again = read(Memory(random.Random(seed).sample(mixed, 3), seed), block_tokens=TOKENS)
        assert (again.group, again.block_order, again.layer_of) == (first.group, first.block_order, first.layer_of)
    assert [c.layers for c in first.group.components] == [(*range(6), 10), (7, 8, 9), (0, 3)]


def test_layers_that_share_a_tensor_are_one_and_wait_for_its_owner() -> None:
    memory = Memory([Spec(PAGES, ORDER, layers=TARGET)], 1)
    sharing = dict(zip(names(5, 6), (TARGET[1], TARGET[2]), strict=True))
    tensors = memory.tensors()
    tensors |= {layer: tensors[target] for layer, target in sharing.items()}
    caches = read_layers(tensors, [*sharing, *TARGET])
    assert caches.group == read(memory, block_tokens=TOKENS).group
    assert caches.layer_of == {TARGET[0]: 0, TARGET[1]: 1, TARGET[2]: 2} | dict(zip(sharing, (1, 2), strict=True))
    check_round_trip(memory, caches, [3, 1], [0, 3], TARGET)


def test_layers_of_other_groups_are_not_looked_at() -> None:
    memory = Memory([Spec(PAGES, ORDER, layers=TARGET)], 1)
    others = {"model.layers.3.mixer": [torch.zeros(3), torch.zeros(4)], "encoder": object()}
    caches = read_layers(memory.tensors() | others, TARGET)
    assert set(caches.layer_of) == set(TARGET)


def test_the_tensors_are_kept_alive() -> None:
    memory = Memory([Spec(PAGES, ORDER, layers=TARGET)], 1)
    tensors = memory.tensors()
    caches = read_layers(tensors, TARGET)
    held = [id(tensor) for region in caches.device.buffers for tensor in region.owner]  # type: ignore[attr-defined]
    assert held == [id(tensor) for tensor in tensors.values()]


LAYER = TARGET[0]


def read_layers(kv_caches: dict[str, Any], layers: Sequence[str] = (LAYER,), **changed: Any) -> RegisteredCaches:
    arguments: dict[str, Any] = {
        "layer_index": index_of,
        "num_blocks": BLOCKS,
        "block_tokens": TOKENS,
        "blocks_per_page": 1,
        "block_dim": lambda name, tensor: 0,
        "backend_of": lambda name: "BACKEND",
    }
    return read_kv_caches(kv_caches, layers, **arguments | changed)


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


def zeros(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.uint16)


def expanded(array: np.ndarray[Any, Any], axis: int) -> np.ndarray[Any, Any]:
    return np.broadcast_to(array, tuple(3 if i == axis else n for i, n in enumerate(array.shape)))


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a layer of which vLLM registered nothing": (None, {}, LayoutError, "registered no KV cache"),
    "a state layer's list": ([zeros(BLOCKS, 4)], {}, LayoutError, "cannot be read; got list"),
    "raw storage": (zeros(BLOCKS * TOKENS), {}, LayoutError, "has no blocks that can be read"),
    "an empty tensor": (zeros(BLOCKS, 0, 4), {}, LayoutError, "has no usable shape"),
    "no such axis": (zeros(BLOCKS, 4), {"block_dim": lambda *_: 2}, LayoutError, "block axis 2"),
    "an axis counted from the end": (zeros(4, BLOCKS), {"block_dim": lambda *_: -1}, LayoutError, "block axis -1"),
    "too few blocks": (zeros(BLOCKS - 1, 4), {}, GeometryError, "another number of blocks"),
    "blocks that are no multiple": (zeros(BLOCKS + 1, 4), {}, GeometryError, "got 6 along axis 0 .*; expected 5, or"),
    "kernel blocks that cut a token": (zeros(3 * BLOCKS, 4), {}, GeometryError, "another number of blocks"),
    "the same bytes for all tokens": (expanded(zeros(BLOCKS, 1), 1), {}, LayoutError, "lie in no regular order"),
    "two gaps": (zeros(BLOCKS, 4, 4, 4)[:, :3, :3, :3], {}, LayoutError, "lie in no regular order"),
    "the same bytes for several heads": (expanded(zeros(BLOCKS, 1, 4), 1), {}, LayoutError, "lie in no regular order"),
    "an index that vLLM cannot tell": (
        zeros(BLOCKS, 4), {"layer_index": raising(AssertionError("one integer"))}, LayoutError,
        "does not tell its index; got AssertionError: one integer",
    ),
    "no index": (zeros(BLOCKS, 4), {"layer_index": lambda _: None}, LayoutError, "has no index; got None"),
    "a negative index": (zeros(BLOCKS, 4), {"layer_index": lambda _: -1}, LayoutError, "has no index; got -1"),
    "an axis that vLLM cannot tell": (
        zeros(BLOCKS, 4), {"block_dim": raising(NotImplementedError())}, LayoutError, "does not tell which axis",
    ),
    "a backend that vLLM cannot tell": (
        zeros(BLOCKS, 4), {"backend_of": raising(KeyError("x"))}, LayoutError, "does not tell its attention backend",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_layer_that_cannot_be_described_is_named_with_the_reason(what: str) -> None:
    tensor, changed, error, message = REFUSED[what]
    with pytest.raises(error, match=message) as caught:
        read_layers({} if tensor is None else {LAYER: tensor}, **changed)
    assert repr(LAYER) in str(caught.value)


def test_planes_that_overlap_are_refused() -> None:
    """What 0.20 makes of padded pages where K and V are planes: it strides the planes by a page."""
    raw = np.zeros(4096, np.uint8)
    tensor = np.ndarray((2, BLOCKS, 4, 8), np.uint8, raw, 0, (80, 32, 8, 1))
    with pytest.raises(LayoutError, match=r"overlap.*'k': 'model.layers.\*.self_attn.attn'"):
        read_layers({LAYER: tensor}, block_dim=lambda *_: 1)


def test_layers_that_overlap_and_are_not_the_same_are_refused() -> None:
    tensor = zeros(2 * BLOCKS, 4)
    with pytest.raises(LayoutError, match=r"of layer 0 and 'block' of layer 1 overlap.*model.layers.\*.self_attn.attn"):
        read_layers(dict(zip(TARGET, (tensor[:BLOCKS], tensor[2 : BLOCKS + 2]), strict=False)), TARGET[:2])


def test_layers_on_two_devices_are_refused() -> None:
    tensors = {TARGET[0]: torch.zeros(BLOCKS, 4), TARGET[1]: torch.zeros(BLOCKS, 4, device="meta")}
    with pytest.raises(LayoutError, match=rf"{TARGET[1]!r} lies elsewhere; got meta:0; expected cpu"):
        read_layers(tensors, TARGET[:2])


def test_no_layers_and_sizes_out_of_range_are_refused() -> None:
    with pytest.raises(LayoutError, match="no layers to serve"):
        read_layers({}, ())
    with pytest.raises(ValueError, match="num_blocks is out of range"):
        read_layers({LAYER: zeros(BLOCKS, 4)}, num_blocks=0)
