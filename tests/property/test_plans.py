"""Every pair of layouts, byte for byte, against an oracle that knows nothing but the formula of ComponentLayout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhoist.copy.nests import End, Nest
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.reference import BoundPlan, copy
from kvhoist.device_layout import check_disjoint
from kvhoist.geometry import CacheGroup, Component
from kvhoist.layout import ComponentLayout, HostOrder, Layout, Place, Unit, host_layout
from kvhoist.platform.base import MemoryRegion

GUARD_BYTES = 64


class Memory:
    """A layout's buffers with guard bytes around each, filled with random bytes."""

    def __init__(self, layout: Layout, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.layout = layout
        self.arrays = [rng.integers(0, 256, n + 2 * GUARD_BYTES, dtype=np.uint8) for n in layout.buffer_bytes]

    @property
    def regions(self) -> list[MemoryRegion]:
        return [
            MemoryRegion(a.__array_interface__["data"][0] + GUARD_BYTES, len(a) - 2 * GUARD_BYTES, owner=a)
            for a in self.arrays
        ]

    def snapshot(self) -> list[np.ndarray[Any, Any]]:
        return [array.copy() for array in self.arrays]


def byte_place(layout: Layout, index: int, layer: int, ids: list[int], row: int, byte: int) -> tuple[int, int]:
    """Where byte `byte` of row `row` of a page stands; `ids` are the page's unit ids. The formula, and nothing else."""
    placed = layout.components[index]
    unit, row_in_unit = ids[row // placed.num_rows], row % placed.num_rows
    part, byte_in_part = divmod(byte, placed.part_bytes)
    place = placed.places[layer]
    offset = (
        place.offset_bytes
        + unit * placed.unit_stride_bytes
        + part * placed.part_stride_bytes
        + row_in_unit * placed.row_stride_bytes
        + byte_in_part
    )
    return place.buffer, offset + GUARD_BYTES


def naive_copy(
    src: Layout, src_arrays: list[Any], src_ids: list[int], dst: Layout, dst_arrays: list[Any], dst_ids: list[int],
    layers: tuple[int, ...],
) -> None:  # fmt: skip
    """Copy pages one byte at a time, none to a unit -1."""
    group = src.group
    src_each = group.blocks_per_page if src.unit is Unit.BLOCK else 1
    dst_each = group.blocks_per_page if dst.unit is Unit.BLOCK else 1
    for page in range(len(src_ids) // src_each):
        a = src_ids[page * src_each : (page + 1) * src_each]
        b = dst_ids[page * dst_each : (page + 1) * dst_each]
        for index, component in enumerate(group.components):
            for i, layer in enumerate(component.layers):
                if layer not in layers:
                    continue
                for row, byte in product(range(group.rows_per_page(component)), range(component.row_bytes)):
                    if b[row // dst.components[index].num_rows] == -1:
                        continue
                    from_buffer, from_offset = byte_place(src, index, i, a, row, byte)
                    to_buffer, to_offset = byte_place(dst, index, i, b, row, byte)
                    dst_arrays[to_buffer][to_offset] = src_arrays[from_buffer][from_offset]


@st.composite
def groups(draw: st.DrawFn) -> CacheGroup:
    """K and V, with scales, K-only, MLA, DSA, opaque blocks; layers that some components lack; 1 to 4 blocks a page."""
    layers = tuple(sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=3))))
    blocks = draw(st.integers(1, 4))
    block_tokens = draw(st.sampled_from([1, 2, 3]))
    row = draw(st.sampled_from([2, 6, 8, 12]))
    some = tuple(sorted(draw(st.sets(st.sampled_from(layers), min_size=1))))
    kind = draw(st.sampled_from(["kv", "kv differing", "kv scales", "k", "latent index", "opaque"]))
    components = {
        "kv": [Component("k", layers, row), Component("v", layers, row)],
        "kv differing": [Component("k", layers, row), Component("v", some, row + 2)],
        "kv scales": [Component(n, layers, b) for n, b in (("k", row), ("v", row), ("k_scale", 2), ("v_scale", 2))],
        "k": [Component("k", layers, row)],
        "latent index": [Component("latent", layers, row + 1), Component("index_k", some, 4)],
        "opaque": [Component("block", layers, 3 * row, tokens_per_row=block_tokens)],
    }[kind]
    return CacheGroup(tuple(components), block_tokens * blocks, blocks)


@st.composite
def device_layouts(draw: st.DrawFn, group: CacheGroup, num_pages: int) -> Layout:
    """Any order of the axes layer, component, unit, row, part, with gaps, over one buffer or many."""
    unit = draw(st.sampled_from([Unit.BLOCK, Unit.BLOCK, Unit.PAGE]))
    num_units = num_pages * (group.blocks_per_page if unit is Unit.BLOCK else 1)
    rows_of = group.rows_per_block if unit is Unit.BLOCK else group.rows_per_page
    alike: dict[tuple[Any, ...], list[Component]] = {}
    fuse = draw(st.booleans())
    for component in group.components:
        key = (component.layers, component.row_bytes, component.tokens_per_row) if fuse else (component.name,)
        alike.setdefault(key, []).append(component)
    buffers: list[int] = []
    placed: dict[str, ComponentLayout] = {}
    for components in alike.values():
        first = components[0]
        num_parts = draw(st.sampled_from([n for n in range(1, 7) if first.row_bytes % n == 0]))
        lengths = {
            "unit": num_units,
            "row": rows_of(first),
            "part": num_parts,
            "component": len(components),
            "layer": len(first.layers),
        }
        one_tensor = draw(st.booleans())
        order = draw(st.permutations(["unit", "row", "part", "component"] + ["layer"] * one_tensor))
        strides = {"layer": 0}
        extent = first.row_bytes // num_parts
        for axis in reversed(order):
            strides[axis] = extent + draw(st.sampled_from([0, 0, 0, 3, 4]))
            extent = strides[axis] * (lengths[axis] - 1) + extent
        start = draw(st.sampled_from([0, 8, 5]))
        first_buffer = len(buffers)
        buffers += [start + extent] * (1 if one_tensor else len(first.layers))
        for i, component in enumerate(components):
            places = tuple(
                Place(
                    first_buffer + (0 if one_tensor else layer),
                    start + i * strides["component"] + layer * strides["layer"],
                )
                for layer in range(len(first.layers))
            )
            placed[component.name] = ComponentLayout(
                component.name, places, strides["unit"], strides["row"], rows_of(component),
                first.row_bytes // num_parts, num_parts, strides["part"],
            )  # fmt: skip
    layout = Layout("device", group, unit, num_units, tuple(buffers), tuple(placed[c.name] for c in group.components))
    check_disjoint(layout)
    return layout


@st.composite
def layouts(draw: st.DrawFn, group: CacheGroup, num_pages: int) -> Layout:
    orders = [order for order in HostOrder if order is not HostOrder.PAGE_FIRST or _rows_alternate(group)]
    if draw(st.integers(0, 2)) == 0:
        return host_layout(group, num_pages, draw(st.sampled_from(orders)))
    return draw(device_layouts(group, num_pages))


def _rows_alternate(group: CacheGroup) -> bool:
    return len({component.tokens_per_row for component in group.components}) == 1


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, Layout, list[int], list[int], int]:
    """Two layouts of one group, and the ids of one to three pages in each, scattered."""
    group = draw(groups())
    a, b = draw(layouts(group, 4)), draw(layouts(group, 3))
    num_pages = draw(st.integers(1, 3))
    return a, b, draw(unit_ids(a, num_pages)), draw(unit_ids(b, num_pages)), draw(st.integers(0, 1 << 30))


def unit_ids(layout: Layout, num_pages: int) -> st.SearchStrategy[list[int]]:
    each = layout.group.blocks_per_page if layout.unit is Unit.BLOCK else 1
    return st.permutations(range(layout.num_units)).map(lambda ids: ids[: num_pages * each])


def expected_after(
    src: Memory, src_ids: list[int], dst: Memory, dst_ids: list[int], layers: tuple[int, ...]
) -> list[Any]:
    expected = dst.snapshot()
    naive_copy(src.layout, src.arrays, src_ids, dst.layout, expected, dst_ids, layers)
    return expected


@given(cases())
def test_every_pair_of_layouts_is_byte_exact_both_ways_and_touches_nothing_else(case: Any) -> None:
    a, b, a_ids, b_ids, seed = case
    for src, src_ids, dst, dst_ids in ((a, a_ids, b, b_ids), (b, b_ids, a, a_ids)):
        source, target = Memory(src, seed), Memory(dst, seed + 1)
        before = source.snapshot()
        expected = expected_after(source, src_ids, target, dst_ids, src.group.layers)
        plan = CopyPlan.make(src, dst)
        moved = copy(plan, source.regions, src_ids, target.regions, dst_ids)
        assert all(np.array_equal(x, y) for x, y in zip(target.arrays, expected, strict=True))
        assert all(np.array_equal(x, y) for x, y in zip(source.arrays, before, strict=True))
        each = src.group.blocks_per_page if src.unit is Unit.BLOCK else 1
        assert moved == len(src_ids) // each * src.group.page_bytes == len(src_ids) // each * plan.page_bytes


@given(cases(), st.data())
def test_destination_blocks_left_out_are_not_written_and_the_rest_of_their_pages_is(
    case: Any, data: st.DataObject
) -> None:
    a, b, a_ids, b_ids, seed = case
    for src, src_ids, dst, dst_ids in ((a, a_ids, b, b_ids), (b, b_ids, a, a_ids)):
        may = dst.unit is Unit.BLOCK
        left_out = data.draw(st.lists(st.booleans(), min_size=len(dst_ids), max_size=len(dst_ids)))
        chosen = [-1 if may and out else unit for unit, out in zip(dst_ids, left_out, strict=True)]
        source, target = Memory(src, seed), Memory(dst, seed + 1)
        expected = expected_after(source, src_ids, target, chosen, src.group.layers)
        plan = CopyPlan.make(src, dst)
        moved = copy(plan, source.regions, src_ids, target.regions, chosen)
        assert all(np.array_equal(x, y) for x, y in zip(target.arrays, expected, strict=True))
        each = src.group.blocks_per_page if may else 1
        assert moved == (len(chosen) - chosen.count(-1)) * src.group.page_bytes // each


@given(cases(), st.data())
def test_plans_of_layer_groups_together_move_what_the_whole_plan_moves(case: Any, data: st.DataObject) -> None:
    a, b, a_ids, b_ids, seed = case
    source, target = Memory(a, seed), Memory(b, seed + 1)
    plan = CopyPlan.make(a, b)
    parts = plan.layer_groups(data.draw(st.integers(1, 4)))
    assert tuple(layer for part in parts for layer in part.layers) == a.group.layers
    assert sum(part.page_bytes for part in parts) == plan.page_bytes
    done: tuple[int, ...] = ()
    whole = Memory(b, seed + 1)
    for part in data.draw(st.permutations(parts)):
        BoundPlan(part, source.regions, target.regions).copy(a_ids, b_ids)
        done += part.layers
        expected = expected_after(source, a_ids, whole, b_ids, done)
        assert all(np.array_equal(x, y) for x, y in zip(target.arrays, expected, strict=True))


@given(cases())
def test_a_round_trip_is_the_identity(case: Any) -> None:
    a, b, a_ids, b_ids, seed = case
    source, middle = Memory(a, seed), Memory(b, seed + 1)
    copy(CopyPlan.make(a, b), source.regions, a_ids, middle.regions, b_ids)
    after = Memory(a, seed)
    for array in after.arrays:
        array[:] = 0
    copy(CopyPlan.make(b, a), middle.regions, b_ids, after.regions, a_ids)
    expected = Memory(a, seed)
    for array in expected.arrays:
        array[:] = 0
    naive_copy(a, source.arrays, a_ids, a, expected.arrays, a_ids, a.group.layers)
    assert all(np.array_equal(x, y) for x, y in zip(after.arrays, expected.arrays, strict=True))


def runs_of(nest: Nest) -> Iterator[tuple[tuple[End, int], tuple[End, int]]]:
    """Yield (what the address depends on, offset) of both sides, for every run of a nest."""
    for index in product(*(range(axis.length) for axis in nest.axes)):
        src = sum(i * axis.src_stride_bytes for i, axis in zip(index, nest.axes, strict=True))
        dst = sum(i * axis.dst_stride_bytes for i, axis in zip(index, nest.axes, strict=True))
        yield (
            (replace(nest.src, offset_bytes=0), nest.src.offset_bytes + src),
            (replace(nest.dst, offset_bytes=0), nest.dst.offset_bytes + dst),
        )


@given(cases())
def test_no_two_runs_of_a_plan_could_be_one(case: Any) -> None:
    a, b, *_ = case
    plan = CopyPlan.make(a, b)
    runs = {(src, dst): nest.run_bytes for nest in plan.nests for src, dst in runs_of(nest)}
    assert plan.num_runs == len(runs) * plan.steps_per_page
    for ((src, src_offset), (dst, dst_offset)), num_bytes in runs.items():
        assert ((src, src_offset + num_bytes), (dst, dst_offset + num_bytes)) not in runs
        assert src_offset % min(plan.alignment_bytes, 1 << 30) == dst_offset % plan.alignment_bytes == 0
        assert num_bytes % plan.alignment_bytes == 0


@pytest.mark.parametrize("damage", ["one run is shorter", "one stride is off", "one offset is off"])
def test_the_oracle_sees_a_planted_mutation(damage: str) -> None:
    group = CacheGroup((Component("k", (0, 1), 8), Component("v", (0, 1), 8)), 4, 2)
    src, dst = host_layout(group, 3, HostOrder.LAYER_FIRST), host_layout(group, 3, HostOrder.PAGE_FIRST)
    source, target = Memory(src, 1), Memory(dst, 2)
    plan = CopyPlan.make(src, dst)
    nest = plan.nests[0]
    axis = nest.axes[-1]
    damaged = {
        "one run is shorter": replace(nest, run_bytes=nest.run_bytes - 1),
        "one stride is off": replace(nest, axes=(*nest.axes[:-1], axis._replace(src_stride_bytes=axis[1] + 1))),
        "one offset is off": replace(nest, dst=replace(nest.dst, offset_bytes=nest.dst.offset_bytes + 1)),
    }[damage]
    expected = expected_after(source, [2, 0], target, [1, 2], group.layers)
    copy(replace(plan, nests=(damaged, *plan.nests[1:])), source.regions, [2, 0], target.regions, [1, 2])
    assert not all(np.array_equal(x, y) for x, y in zip(target.arrays, expected, strict=True))
