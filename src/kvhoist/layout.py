"""Where a component's bytes lie: affine over the axes layer, page or block, part (head) and row."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvhoist.errors import LayoutError
from kvhoist.geometry import CacheGroup, Component
from kvhoist.units import round_up


class Unit(StrEnum):
    """What one id of a layout names."""

    PAGE = "page"
    BLOCK = "block"


class HostOrder(StrEnum):
    """The order of the bytes inside a host page, outermost first."""

    PAGE_FIRST_DIRECT = "page_first_direct"  # layer, component, row: a layer group is one run
    PAGE_FIRST = "page_first"  # row, layer, component: loads whole pages only
    LAYER_FIRST = "layer_first"  # layer, component, then all pages: for plans and comparisons, never persisted


@dataclass(frozen=True, slots=True)
class Place:
    """The first byte of a layer: an offset into one of the layout's buffers."""

    buffer: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class ComponentLayout:
    """Where one component lies. Byte `b` of part `p` of row `r` of unit `u` of layer `layers[i]` stands at

        places[i].offset_bytes + u * unit_stride_bytes + p * part_stride_bytes + r * row_stride_bytes + b

    of buffer `places[i].buffer`, with `0 <= b < part_bytes`. A row is its parts one after the other: `num_parts` is 1
    where a row is contiguous, the number of heads in a head-major cache. `num_rows` counts the rows of one unit.
    """

    component: str
    places: tuple[Place, ...]
    unit_stride_bytes: int
    row_stride_bytes: int
    num_rows: int
    part_bytes: int
    num_parts: int = 1
    part_stride_bytes: int = 0

    @property
    def layer_pitch_bytes(self) -> int | None:
        """Bytes from one layer to the next where all stand in one buffer at one pitch, else None (0 for one layer)."""
        first = self.places[0]
        if len(self.places) == 1:
            return 0
        pitch = self.places[1].offset_bytes - first.offset_bytes
        regular = all(
            place == Place(first.buffer, first.offset_bytes + i * pitch) for i, place in enumerate(self.places)
        )
        return pitch if regular else None


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a cache group's bytes lie in `buffers` of the given lengths, for unit ids `0 <= u < num_units`.

    Raises LayoutError when a component would reach outside of its buffer or its rows do not add up to the group's.
    """

    name: str
    group: CacheGroup
    unit: Unit
    num_units: int
    buffer_bytes: tuple[int, ...]
    components: tuple[ComponentLayout, ...]

    def __post_init__(self) -> None:
        if self.num_units < 1:
            raise LayoutError("a layout needs at least one unit", got=self.num_units)
        if [c.component for c in self.components] != [c.name for c in self.group.components]:
            raise LayoutError(
                f"layout {self.name!r} does not place the group's components",
                got=[c.component for c in self.components],
                expected=[c.name for c in self.group.components],
            )
        for component, placed in zip(self.group.components, self.components, strict=True):
            self._check(component, placed)

    def _check(self, component: Component, placed: ComponentLayout) -> None:
        rows_per_unit = self.group.rows_per_page if self.unit is Unit.PAGE else self.group.rows_per_block
        got = (len(placed.places), placed.num_rows, placed.num_parts * placed.part_bytes)
        expected = (len(component.layers), rows_per_unit(component), component.row_bytes)
        if got != expected:
            raise LayoutError(
                f"layout {self.name!r} does not hold the rows of {component.name!r}",
                got="{} layers, {} rows a unit, {} bytes a row".format(*got),
                expected="{} layers, {} rows a unit, {} bytes a row".format(*expected),
            )
        strides = (placed.unit_stride_bytes, placed.row_stride_bytes, placed.part_stride_bytes)
        last = (
            (self.num_units - 1) * placed.unit_stride_bytes
            + (placed.num_rows - 1) * placed.row_stride_bytes
            + (placed.num_parts - 1) * placed.part_stride_bytes
            + placed.part_bytes
        )
        for place in placed.places:
            inside = 0 <= place.buffer < len(self.buffer_bytes) and place.offset_bytes >= 0 and min(strides) >= 0
            if not inside or place.offset_bytes + last > self.buffer_bytes[place.buffer]:
                raise LayoutError(
                    f"{component.name!r} of layout {self.name!r} reaches outside of its buffer",
                    got=f"{place}, strides (unit, row, part) {strides}, last byte {place.offset_bytes + last}",
                    expected=f"all bytes inside buffers of {self.buffer_bytes} bytes, strides not negative",
                )


def host_layout(group: CacheGroup, num_pages: int, order: HostOrder = HostOrder.PAGE_FIRST_DIRECT) -> Layout:
    """Return the layout of `num_pages` host pages of `group` in one buffer.

    `page_first_direct` and `page_first` pages stand `group.page_pitch_bytes` apart; `layer_first` has no page pitch.
    Raises LayoutError for `page_first` where components differ in tokens_per_row (their rows cannot alternate).
    """
    if order is HostOrder.LAYER_FIRST:
        return _layer_first(group, num_pages)
    if order is HostOrder.PAGE_FIRST and len({c.tokens_per_row for c in group.components}) > 1:
        raise LayoutError(
            "page_first cannot alternate rows of different tokens_per_row",
            got={c.name: c.tokens_per_row for c in group.components},
            expected="one tokens_per_row for all components",
            remedy=f"Use {HostOrder.PAGE_FIRST_DIRECT}.",
        )
    by_row = order is HostOrder.PAGE_FIRST
    row_pitch = sum(len(c.layers) * c.row_bytes for c in group.components)
    places: dict[str, list[Place]] = {c.name: [] for c in group.components}
    offset = 0
    for layer in group.layers:
        for component in group.components:
            if layer in component.layers:
                places[component.name].append(Place(0, offset))
                offset += component.row_bytes * (1 if by_row else group.rows_per_page(component))
    components = tuple(
        ComponentLayout(
            component=c.name,
            places=tuple(places[c.name]),
            unit_stride_bytes=group.page_pitch_bytes,
            row_stride_bytes=row_pitch if by_row else c.row_bytes,
            num_rows=group.rows_per_page(c),
            part_bytes=c.row_bytes,
        )
        for c in group.components
    )
    return Layout(order.value, group, Unit.PAGE, num_pages, (num_pages * group.page_pitch_bytes,), components)


def _layer_first(group: CacheGroup, num_pages: int) -> Layout:
    components = []
    offset = 0
    for c in group.components:
        page_bytes = group.rows_per_page(c) * c.row_bytes
        layer_bytes = round_up(num_pages * page_bytes, 64)
        places = tuple(Place(0, offset + i * layer_bytes) for i in range(len(c.layers)))
        offset += layer_bytes * len(c.layers)
        components.append(
            ComponentLayout(c.name, places, page_bytes, c.row_bytes, group.rows_per_page(c), part_bytes=c.row_bytes)
        )
    name = HostOrder.LAYER_FIRST.value
    return Layout(name, group, Unit.PAGE, num_pages, (offset,), tuple(components))
