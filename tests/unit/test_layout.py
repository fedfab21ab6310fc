"""Host layouts: each byte of a page has its own place, where the order says; and the layouts that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvhoist.device_layout import check_disjoint
from kvhoist.errors import LayoutError
from kvhoist.geometry import CacheGeometry, CacheGroup, Component
from kvhoist.layout import ComponentLayout, HostOrder, Layout, Place, Unit, host_layout

GROUP = CacheGroup((Component("k", (0, 1, 3), 8), Component("v", (0, 3), 4)), page_tokens=4)


def order_of_page(layout: Layout) -> list[tuple[int, str, int]]:
    """(layer, component, row) of page 0 by ascending offset."""
    places = [
        (place.offset_bytes + row * placed.row_stride_bytes, (layer, component.name, row))
        for component, placed in zip(layout.group.components, layout.components, strict=True)
        for layer, place in zip(component.layers, placed.places, strict=True)
        for row in range(placed.num_rows)
    ]
    return [what for _, what in sorted(places)]


def test_page_first_direct_is_layer_component_row() -> None:
    layout = host_layout(GROUP, 3)
    expected = [(layer, c, row) for layer, cs in ((0, "kv"), (1, "k"), (3, "kv")) for c in cs for row in range(4)]
    assert order_of_page(layout) == expected
    assert layout.buffer_bytes == (3 * 4096,)
    assert layout.name == "page_first_direct"


def test_page_first_is_row_layer_component() -> None:
    layout = host_layout(GROUP, 3, HostOrder.PAGE_FIRST)
    layers = ((0, "kv"), (1, "k"), (3, "kv"))
    assert order_of_page(layout) == [(layer, c, row) for row in range(4) for layer, cs in layers for c in cs]


@pytest.mark.parametrize("order", HostOrder)
def test_no_two_bytes_of_host_pages_share_a_place(order: HostOrder) -> None:
    layout = host_layout(GROUP, 5, order)
    check_disjoint(layout)
    assert sum(layout.buffer_bytes) >= 5 * GROUP.page_bytes


def test_page_first_refuses_rows_that_cannot_alternate() -> None:
    mixed = CacheGroup((Component("k", (0,), 8), Component("block", (0,), 64, 4)), page_tokens=4)
    with pytest.raises(LayoutError, match="page_first_direct"):
        host_layout(mixed, 2, HostOrder.PAGE_FIRST)


def test_layer_pitch_is_known_where_layers_are_regular() -> None:
    regular = host_layout(CacheGeometry.latent(3, row_bytes=8, page_tokens=4).groups[0], 2)
    assert regular.components[0].layer_pitch_bytes == 32
    assert host_layout(GROUP, 2).components[0].layer_pitch_bytes is None
    assert replace(regular.components[0], places=(Place(0, 0),)).layer_pitch_bytes == 0
    elsewhere = replace(regular.components[0], places=(Place(0, 0), Place(1, 0), Place(2, 0)))
    assert elsewhere.layer_pitch_bytes is None


ONE = CacheGroup((Component("k", (0,), 8),), page_tokens=2)
PLACED = ComponentLayout("k", (Place(0, 0),), 16, 8, 2, 8)


def one(placed: ComponentLayout = PLACED, **other: Any) -> Layout:
    fields: dict[str, Any] = {
        "name": "x", "group": ONE, "unit": Unit.PAGE, "num_units": 4, "buffer_bytes": (64,), "components": (placed,),
    } | other  # fmt: skip
    return Layout(**fields)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: one(num_units=0), "at least one unit"),
        (lambda: one(components=()), "does not place"),
        (lambda: one(replace(PLACED, num_rows=1)), "does not hold the rows"),
        (lambda: one(replace(PLACED, part_bytes=4)), "does not hold the rows"),
        (lambda: one(replace(PLACED, places=())), "does not hold the rows"),
        (lambda: one(buffer_bytes=(63,)), "outside of its buffer"),
        (lambda: one(num_units=5), "outside of its buffer"),
        (lambda: one(replace(PLACED, places=(Place(1, 0),))), "outside of its buffer"),
        (lambda: one(replace(PLACED, places=(Place(0, -1),))), "outside of its buffer"),
        (lambda: one(replace(PLACED, row_stride_bytes=-8)), "outside of its buffer"),
    ],
)
def test_a_layout_that_reaches_outside_or_holds_other_rows_is_refused(make: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        make()


@pytest.mark.parametrize(
    "placed",
    [
        replace(PLACED, unit_stride_bytes=8),
        replace(PLACED, unit_stride_bytes=0),
        replace(PLACED, row_stride_bytes=4),
        replace(PLACED, part_bytes=4, num_parts=2, part_stride_bytes=2),
    ],
)
def test_units_rows_and_parts_that_overlap_are_found(placed: ComponentLayout) -> None:
    with pytest.raises(LayoutError, match="overlap"):
        check_disjoint(one(placed))


@pytest.mark.parametrize(("shift", "meets"), [(0, True), (3, True), (7, True), (8, False), (16, True), (24, False)])
def test_components_that_interleave_meet_only_where_they_share_a_byte(shift: int, meets: bool) -> None:
    group = CacheGroup((Component("k", (0,), 8), Component("v", (0,), 8)), page_tokens=2)
    k = ComponentLayout("k", (Place(0, 0),), 32, 16, 2, 8)
    v = replace(k, component="v", places=(Place(0, shift),))
    layout = Layout("x", group, Unit.PAGE, 4, (200,), (k, v))
    if meets:
        with pytest.raises(LayoutError, match="'k' of layer 0 and 'v' of layer 0 overlap"):
            check_disjoint(layout)
    else:
        check_disjoint(layout)
