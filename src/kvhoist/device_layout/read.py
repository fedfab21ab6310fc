"""read_device_layout: from an engine's tensors and the names of their axes to a Layout."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvhoist.device_layout.axes import BLOCK, KV, LAYER, REST, ROW_AXES, SLOT, TOKEN, Axes, AxisView
from kvhoist.device_layout.disjoint import check_disjoint
from kvhoist.device_layout.tensors import TensorBytes, read_tensor, spans
from kvhoist.errors import GeometryError, LayoutError
from kvhoist.geometry import CacheGroup, Component
from kvhoist.layout import ComponentLayout, Layout, Place, Unit
from kvhoist.platform.base import Device, MemoryRegion


@dataclass(frozen=True, slots=True)
class DeviceCache:
    """An engine's KV cache: where its bytes lie, and the memory, whose tensors the regions keep alive."""

    layout: Layout
    buffers: tuple[MemoryRegion, ...]
    device: Device

    @property
    def num_blocks(self) -> int:
        return self.layout.num_units


@dataclass(frozen=True, slots=True)
class _Entry:
    """Tensors that hold the same components in the same way: one a layer, or one with a layer axis."""

    components: tuple[Component, ...]
    axes: Axes
    tensors: tuple[TensorBytes, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return self.components[0].layers


def read_device_layout(
    group: CacheGroup,
    tensors: Mapping[str, Any] | Sequence[Any] | Any,
    axes: str | Mapping[str, str],
    *,
    name: str = "device",
) -> DeviceCache:
    """Read where `tensors` keep the blocks of `group`.

    `tensors` maps component names to one tensor a layer (in the order of the component's layers), or to one tensor with
    a `layer` axis. Tensors that hold several components along a `kv` axis stand under their names with a space between
    (`"k v"`); without a mapping they hold all of the group's components. torch tensors and numpy arrays work, as views
    with any strides, several over one storage.

    `axes` names the dimensions, outermost first, for all tensors or by the same keys:

    - `slot` (one row of the cache) or `block`; `token` a block's rows; `layer`; `kv` the components in their order;
    - `head`, `dim`, `pack`: a row's own bytes, whose order is always head, dim, pack, wherever the axes stand;
    - `...` last: all else of one block, contiguous, copied whole. Its inner order is the engine's business;
    - `(kv dim)`: one dimension that holds two axes.

    Examples: `"slot head dim"`, `"kv block token head dim"`, `"block head token (kv dim)"`, `"layer block ..."`.

    Nothing is copied. The regions own the tensors. Raises LayoutError for tensors or axes that cannot be read, that
    differ among layers or overlap, GeometryError for tensors that do not hold the rows of `group`.
    """
    if not isinstance(group, CacheGroup):
        raise GeometryError("this is no cache group", got=type(group).__name__, remedy="Pass geometry.groups[0].")
    named = _by_key(group, tensors)
    entries = [
        _entry(group, key, held, axes if isinstance(axes, str) else _axes_of(axes, key)) for key, held in named.items()
    ]
    placed = [component.name for entry in entries for component in entry.components]
    if sorted(placed) != sorted(component.name for component in group.components):
        raise LayoutError(
            "the tensors do not hold each component of the cache group once",
            got=placed,
            expected=[component.name for component in group.components],
            remedy="Give a mapping from component names to tensors; 'k v' names tensors that hold both.",
        )
    found = [tensor for entry in entries for tensor in entry.tensors]
    device = _one("device", {tensor.label: tensor.device for tensor in found})
    storages = spans(found)
    places = {name: layout for entry in entries for name, layout in _read(group, entry, storages).items()}
    num_units = _one("number of blocks", {name: count for name, (count, _) in places.items()})
    layout = Layout(
        name,
        group,
        Unit.BLOCK,
        num_units,
        tuple(end - start for start, end in storages),
        tuple(places[component.name][1] for component in group.components),
    )
    check_disjoint(layout)
    owner = tuple(named.values())
    return DeviceCache(layout, tuple(MemoryRegion(a, b - a, device, owner) for a, b in storages), device)


def _by_key(group: CacheGroup, tensors: Any) -> dict[str, Any]:
    if isinstance(tensors, Mapping):
        return dict(tensors)
    return {" ".join(component.name for component in group.components): tensors}


def _axes_of(axes: Mapping[str, str], key: str) -> str:
    if key not in axes:
        raise LayoutError(f"no axes for the tensors of {key!r}", got=list(axes), expected="the keys of the tensors")
    return axes[key]


def _entry(group: CacheGroup, key: str, held: Any, text: str) -> _Entry:
    axes = Axes.parse(text)
    components = tuple(group.component(name) for name in key.split())
    if not components or (len(components) > 1) != (KV in axes.names):
        raise LayoutError(
            f"axes {text!r} do not say where the tensors of {key!r} hold each component",
            got=f"{len(components)} components and {'a' if KV in axes.names else 'no'} 'kv' axis",
            expected="a 'kv' axis where, and only where, a tensor holds several components",
        )
    layers = components[0].layers
    if any(component.layers != layers for component in components):
        raise LayoutError(
            f"components {key!r} cannot share tensors",
            got={component.name: component.layers for component in components},
            expected="the same layers",
        )
    whole = LAYER in axes.names
    listed = list(held) if isinstance(held, Sequence) else [held]
    if len(listed) != (1 if whole else len(layers)):
        raise LayoutError(
            f"the tensors of {key!r} do not match the layers",
            got=f"{len(listed)} tensors with axes {text!r}",
            expected=f"one tensor with a 'layer' axis of {len(layers)}" if whole else f"{len(layers)}, one a layer",
            remedy="Add 'layer' to the axes where one tensor holds all layers.",
        )
    labels = [f"{key!r}" if whole else f"{key!r} of layer {layer}" for layer in (layers[:1] if whole else layers)]
    return _Entry(components, axes, tuple(read_tensor(t, label) for t, label in zip(listed, labels, strict=True)))


def _read(group: CacheGroup, entry: _Entry, storages: list[tuple[int, int]]) -> dict[str, tuple[int, ComponentLayout]]:
    """Return, for each component of the entry, how many blocks there are and where they lie."""
    rows = {group.rows_per_block(component) for component in entry.components}
    num_rows = rows.pop()
    lengths = {KV: len(entry.components), LAYER: len(entry.layers), TOKEN: num_rows}
    first = entry.tensors[0]
    axes = entry.axes.view(first, lengths)
    for tensor in entry.tensors[1:]:
        if entry.axes.view(tensor, lengths) != axes or tensor.item_bytes != first.item_bytes:
            raise tensor.error(
                f"differs from {first.label}",
                got=f"shape {tensor.shape}, strides {tensor.strides_bytes} B, {tensor.dtype}",
                expected=f"shape {first.shape}, strides {first.strides_bytes} B, {first.dtype}",
                remedy="Layers whose caches differ need components, or cache groups, of their own.",
            )
    starts = [start for start, _ in storages]
    layer_stride = axes[LAYER].stride_bytes if LAYER in axes else 0
    found: dict[str, tuple[int, ComponentLayout]] = {}
    for index, component in enumerate(entry.components):
        shift = index * axes[KV].stride_bytes if KV in axes else 0
        places = []
        for i in range(len(entry.layers)):
            address = (first.address + i * layer_stride if LAYER in axes else entry.tensors[i].address) + shift
            buffer = bisect_right(starts, address) - 1
            places.append(Place(buffer, address - starts[buffer]))
        found[component.name] = _component(component, group.rows_per_block(component), tuple(places), axes, first)
    return found


def _component(
    component: Component, num_rows: int, places: tuple[Place, ...], axes: dict[str, AxisView], tensor: TensorBytes
) -> tuple[int, ComponentLayout]:
    if REST in axes:
        part_bytes, (num_parts, part_stride) = axes[REST].length, (1, 0)
        if part_bytes % num_rows == 0:
            part_bytes //= num_rows
        row_stride = part_bytes
    else:
        part_bytes, num_parts, part_stride = _row(axes, tensor)
        row_stride = (axes[SLOT] if SLOT in axes else axes.get(TOKEN, AxisView(1, 0))).stride_bytes
        if SLOT not in axes and TOKEN not in axes and num_rows > 1:
            raise tensor.error("has no 'token' axis", got="one row a block", expected=f"{num_rows} rows a block")
    if num_parts * part_bytes != component.row_bytes:
        raise tensor.mismatch(
            f"does not hold the rows of {component.name!r}",
            got=f"{num_parts * part_bytes} B a row, from shape {tensor.shape} of {tensor.dtype}",
            expected=f"{component.row_bytes} B a row, {num_rows} rows a block",
            remedy="Check the KV dtype, the heads of this rank and the block length of the geometry.",
        )
    if SLOT in axes:
        num_units, unit_stride = axes[SLOT].length // num_rows, axes[SLOT].stride_bytes * num_rows
    else:
        num_units, unit_stride = axes[BLOCK].length, axes[BLOCK].stride_bytes
    layout = ComponentLayout(
        component.name, places, unit_stride, row_stride, num_rows, part_bytes, num_parts, part_stride
    )
    return num_units, layout


def _row(axes: dict[str, AxisView], tensor: TensorBytes) -> tuple[int, int, int]:
    """Return (part_bytes, num_parts, part_stride_bytes) of a row: its innermost axes as far as they are contiguous, and
    what is left as one axis of parts."""
    part_bytes, parts = tensor.item_bytes, AxisView(1, 0)
    names = [name for name in ROW_AXES if name in axes and axes[name].length > 1]
    for name in reversed(names):
        axis = axes[name]
        if parts.length == 1 and axis.stride_bytes == part_bytes:
            part_bytes *= axis.length
        elif parts.length == 1 and (name == ROW_AXES[0] or part_bytes > tensor.item_bytes):
            parts = axis
        elif parts.length > 1 and axis.stride_bytes == parts.length * parts.stride_bytes:
            parts = AxisView(axis.length * parts.length, parts.stride_bytes)
        else:
            raise tensor.error(
                f"has rows that cannot be read: {name!r} is not contiguous",
                got=f"shape {tensor.shape}, strides {tensor.strides_bytes} B of {tensor.dtype}",
                expected="contiguous bytes a head, and one stride from each to the next",
                remedy="Copy blocks whole: axes 'block ...' with CacheGeometry.opaque.",
            )
    return part_bytes, parts.length, parts.stride_bytes


def _one(what: str, values: Mapping[str, Any]) -> Any:
    """Return the value that all share. Raises LayoutError where they differ."""
    if len(set(values.values())) > 1:
        first, *others = values
        odd = next(label for label in others if values[label] != values[first])
        raise LayoutError(
            f"the tensors do not share one {what}",
            got=f"{first}: {values[first]}, {odd}: {values[odd]}",
            expected=f"the same {what} for all",
        )
    return next(iter(values.values()))
