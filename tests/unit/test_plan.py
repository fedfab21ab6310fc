"""Plans: what they say of themselves, which engine they get, and every refusal before a byte is written."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kvhoist.copy.choose import choose_engines
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.reference import BoundPlan
from kvhoist.device_layout import DeviceCache, read_device_layout
from kvhoist.errors import ConfigError, LayoutError, PageIdError
from kvhoist.geometry import CacheGeometry, CacheGroup
from kvhoist.layout import HostOrder, Unit, host_layout
from kvhoist.platform.base import regions_of
from kvhoist.platform.cpu import CpuPlatform

GROUP = CacheGeometry.attention(4, k_row_bytes=32, v_row_bytes=32, page_tokens=8, blocks_per_page=2).groups[0]
HOST = host_layout(GROUP, 4)


def device(axes: str, *shape: int) -> DeviceCache:
    return read_device_layout(GROUP, np.zeros(shape, np.uint16), axes)


INTERLEAVED = device("layer block kv token head dim", 4, 8, 2, 4, 2, 8)


@pytest.mark.parametrize(
    ("axes", "shape", "runs", "run_bytes"),
    [
        ("layer kv block token head dim", (4, 2, 8, 4, 2, 8), 2 * 8, 4 * 32),
        ("layer block kv token head dim", (4, 8, 2, 4, 2, 8), 2 * 8, 4 * 32),
        ("layer kv block head token dim", (4, 2, 8, 2, 4, 8), 2 * 8 * 4 * 2, 16),
    ],
)
def test_runs_are_as_long_as_both_sides_allow(axes: str, shape: tuple[int, ...], runs: int, run_bytes: int) -> None:
    plan = CopyPlan.make(device(axes, *shape).layout, HOST)
    assert (plan.num_runs, plan.min_run_bytes, plan.max_run_bytes) == (runs, run_bytes, run_bytes)
    assert plan.page_bytes == GROUP.page_bytes == plan.steps_per_page * plan.step_bytes


def test_equal_host_orders_move_a_page_in_one_run() -> None:
    assert CopyPlan.make(HOST, host_layout(GROUP, 9)).num_runs == 1


def test_k_and_v_of_a_block_join_where_they_adjoin_on_both_sides() -> None:
    whole_blocks = CacheGeometry.attention(4, k_row_bytes=32, v_row_bytes=32, page_tokens=4).groups[0]
    cache = read_device_layout(whole_blocks, np.zeros((4, 8, 2, 4, 2, 8), np.uint16), "layer block kv token head dim")
    plan = CopyPlan.make(cache.layout, host_layout(whole_blocks, 2))
    assert (plan.num_runs, plan.min_run_bytes) == (4, 2 * 4 * 32)


def test_alignment_divides_every_address() -> None:
    odd = CacheGeometry.latent(2, row_bytes=6, page_tokens=4).groups[0]
    assert CopyPlan.make(host_layout(odd, 2), host_layout(odd, 2, HostOrder.PAGE_FIRST)).alignment_bytes == 2
    assert CopyPlan.make(INTERLEAVED.layout, HOST).alignment_bytes == 128


def chosen(plan: CopyPlan, requested: str = "auto") -> CopyPlan:
    return plan.with_choices(choose_engines(plan, CpuPlatform(), requested, loads=False, staging_bytes=0))


def test_a_plan_prints_itself() -> None:
    plan = chosen(CopyPlan.make(INTERLEAVED.layout, HOST))
    text = str(plan)
    for part in ("device (8 blocks) -> page_first_direct (4 pages)", "16 runs", "128 B", "reference", "4 layers"):
        assert part in text
    told = json.loads(json.dumps(plan.to_dict()))
    assert told["runs_per_page"] == 16
    assert [choice["engine"] for choice in told["engines"]] == ["reference"]
    assert sum(loop["times"] for loop in told["loops"]) == len(plan.nests)


def test_a_plan_of_a_layer_group_moves_those_layers_and_keeps_the_engine() -> None:
    plan = chosen(CopyPlan.make(INTERLEAVED.layout, HOST))
    part = plan.for_layers(1, 3)
    assert part.layers == (1, 2)
    assert part.page_bytes == plan.page_bytes // 2
    assert part.choices == plan.choices != ()
    assert [p.layers for p in plan.layer_groups(3)] == [(0,), (1,), (2, 3)]
    assert [p.layers for p in plan.layer_groups(99)] == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize("layers", [[], [4], [0, -1]])
def test_layers_that_the_group_does_not_have_are_refused(layers: list[int]) -> None:
    with pytest.raises(ConfigError, match="layers that the cache group does not have"):
        CopyPlan.make(HOST, HOST, layers=layers)
    with pytest.raises(ConfigError):
        CopyPlan.make(HOST, HOST).for_layers(4, 9)


def test_layouts_of_two_groups_have_no_plan() -> None:
    other = CacheGeometry.attention(4, k_row_bytes=32, v_row_bytes=32, page_tokens=8).groups[0]
    with pytest.raises(LayoutError, match="one cache group"):
        CopyPlan.make(HOST, host_layout(other, 4))


@pytest.mark.parametrize(
    ("blocks", "pages", "error", "text"),
    [
        ([0, 1, 2], [0], ConfigError, "3 block ids"),
        ([0, 1], [0, 1], ConfigError, "same number of pages"),
        ([0, 8], [0], PageIdError, r"\[8\]"),
        ([0, -1], [0], PageIdError, r"\[-1\]"),
        ([0, 1], [4], PageIdError, "from 0 to 3"),
        ([0, 1, 2, 3], [1, 1], PageIdError, "more than once"),
        ([[0, 1]], [0], ConfigError, "2 dimensions"),
        ([0.0, 1.0], [0], ConfigError, "float64"),
        ([True, False], [0], ConfigError, "bool"),
        (np.array([0, 1 << 63], np.uint64), [0], PageIdError, "outside"),
    ],
)
def test_unusable_ids_are_refused_before_anything_is_written(
    blocks: Any, pages: Any, error: type[Exception], text: str
) -> None:
    host = np.full(HOST.buffer_bytes[0], 7, np.uint8)
    bound = BoundPlan(CopyPlan.make(INTERLEAVED.layout, HOST), INTERLEAVED.buffers, regions_of([host]))
    with pytest.raises(error, match=text):
        bound.copy(np.array(blocks), np.array(pages))
    assert (host == 7).all()


def bound_load(tensor: np.ndarray[Any, Any], group: CacheGroup = GROUP) -> tuple[BoundPlan, np.ndarray[Any, Any]]:
    """Return a plan from host pages of random bytes to `tensor`, and those bytes."""
    cache = read_device_layout(group, tensor, "layer block kv token head dim")
    host = np.random.default_rng(3).integers(0, 256, 4 * group.page_pitch_bytes, dtype=np.uint8)
    return BoundPlan(CopyPlan.make(host_layout(group, 4), cache.layout), regions_of([host]), cache.buffers), host


@pytest.mark.parametrize(
    ("pages", "blocks", "error", "text"),
    [
        ([0, 1], [0, -2, 1, 2], PageIdError, r"\[-2\].*ids from 0 to 7, or -1 for a block to be left out"),
        ([0, -1], [0, 1, 2, 3], PageIdError, r"\[-1\].*ids from 0 to 3(?!, or)"),
        ([0, 1], [5, -1, -1, 5], PageIdError, r"\[5\] more than once"),
        ([0, 1], [-1, -1, -1], ConfigError, "same number of pages"),
        ([0], np.array([0, (1 << 64) - 1], np.uint64), PageIdError, "outside"),
    ],
)
def test_only_minus_one_and_only_for_a_destination_block_leaves_it_out(
    pages: Any, blocks: Any, error: type[Exception], text: str
) -> None:
    tensor = np.full((4, 8, 2, 4, 2, 8), 7, np.uint16)
    with pytest.raises(error, match=f"(?s){text}"):
        bound_load(tensor)[0].copy(pages, blocks)
    assert (tensor == 7).all()


@pytest.mark.parametrize("unit", [Unit.PAGE, Unit.BLOCK])
def test_a_destination_page_is_never_left_out(unit: Unit) -> None:
    source = INTERLEAVED.layout if unit is Unit.BLOCK else HOST
    ids = {Unit.PAGE: [0], Unit.BLOCK: [0, 1]}[unit]
    with pytest.raises(PageIdError, match=r"\[-1\]"):
        CopyPlan.make(source, HOST).check_ids(ids, [-1])


@pytest.mark.parametrize("dim", [8, 2048])
def test_blocks_left_out_are_not_written_by_gathers_and_by_single_steps(dim: int) -> None:
    """Small steps are gathered, large ones copied one by one; to numpy the index -1 would be the last block."""
    row_bytes = 2 * dim * 2
    group = CacheGeometry.attention(4, k_row_bytes=row_bytes, v_row_bytes=row_bytes, page_tokens=8, blocks_per_page=2)
    tensor = np.full((4, 8, 2, 4, 2, dim), 7, np.uint16)
    bound, host = bound_load(tensor, group.groups[0])
    gathered = {move.step_bytes < 8 << 10 for move in bound._moves}
    assert gathered == {dim == 8}
    assert bound.copy([2, 0, 1], [-1, 3, -1, -1, 6, -1]) == 2 * group.groups[0].page_bytes // 2
    expected = np.full_like(tensor, 7)
    pages = host.reshape(4, -1)[:, : group.groups[0].page_bytes].copy().view(np.uint16).reshape(4, 4, 2, 8, 2, dim)
    expected[:, 3], expected[:, 6] = pages[2, :, :, 4:], pages[1, :, :, :4]
    assert (tensor == expected).all()
    assert bound.copy([2, 0], [-1] * 4) == bound.copy([], []) == 0
    assert (tensor == expected).all()


def test_a_source_may_be_read_twice_and_nothing_may_be_asked() -> None:
    host = np.zeros(HOST.buffer_bytes[0], np.uint8)
    bound = BoundPlan(CopyPlan.make(INTERLEAVED.layout, HOST), INTERLEAVED.buffers, regions_of([host]))
    assert bound.copy([1, 1, 1, 1], [0, 2]) == 2 * GROUP.page_bytes
    assert bound.copy([], []) == 0


def test_buffers_that_are_not_the_layouts_are_refused() -> None:
    plan = CopyPlan.make(INTERLEAVED.layout, HOST)
    short = np.zeros(HOST.buffer_bytes[0] - 1, np.uint8)
    for buffers in ([], [short], [short, short]):
        with pytest.raises(LayoutError, match="not those of layout 'page_first_direct'"):
            BoundPlan(plan, INTERLEAVED.buffers, regions_of(buffers))


def test_tensors_at_any_distance_copy_alike() -> None:
    """Layers at one pitch of addresses are one move; others are moves of their own; both move the same bytes."""
    group = CacheGeometry.latent(6, row_bytes=512, page_tokens=16).groups[0]
    rng = np.random.default_rng(1)
    whole = rng.integers(0, 256, (20, 4 * 16, 512), dtype=np.uint8)
    results = []
    for picked in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 2, 3, 7, 9, 19], [19, 0, 10, 3, 8, 7]):
        cache = read_device_layout(group, [whole[i] for i in picked], "slot dim")
        host = np.zeros(4 * group.page_pitch_bytes, np.uint8)
        BoundPlan(CopyPlan.make(cache.layout, host_layout(group, 4)), cache.buffers, regions_of([host])).copy(
            [3, 1], [0, 2]
        )
        pages = host.reshape(4, -1)[:, : group.page_bytes].reshape(4, 6, 16 * 512)
        expected = whole[picked].reshape(6, 4, 16 * 512)
        results.append((pages[[0, 2]] == expected[:, [3, 1]].swapaxes(0, 1)).all() and not pages[[1, 3]].any())
    assert all(results)


def test_engines_are_chosen_by_the_platform_and_never_replaced() -> None:
    plan = CopyPlan.make(INTERLEAVED.layout, HOST)
    assert chosen(plan).choice_for(5).engine == "reference"
    assert chosen(plan, "reference").choice_for(1).why == "requested"
    for engine in ("staged", "dma", "mapped"):
        with pytest.raises(ConfigError, match=f"'{engine}' does not run on the cpu platform") as caught:
            chosen(plan, engine)
        assert "io_backend" in str(caught.value)
    with pytest.raises(ConfigError, match="valid choices: auto, reference, staged, dma, mapped"):
        chosen(plan, "rdma")
