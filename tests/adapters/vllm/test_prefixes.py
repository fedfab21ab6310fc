"""How much can be loaded for a request, and what it waits for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support import namespace, tiny_geometry

from kvhoist.adapters.vllm.counts import SchedulerCounts
from kvhoist.adapters.vllm.prefixes import Prefixes, Waits
from kvhoist.adapters.vllm.requests import PageShape, RequestState
from kvhoist.control.directory import Directory
from kvhoist.control.plane import ControlPlane
from kvhoist.control.policy import WritePolicy
from kvhoist.control.prefetch_policy import PrefetchPolicy
from kvhoist.control.tiers import Tier
from kvhoist.messages import Completion, Job, JobKind

HASHES = [bytes([i]) * 32 for i in range(24)]
SHAPE = PageShape(4, 2, 2)
PATIENCE = PrefetchPolicy(30.0)
"""Blocks of 4 tokens, two to a page."""


class Bench:
    """A control plane of one rank with a prompt's pages, and a clock that stands still."""

    def __init__(
        self, *, storage: bool = False, host_pages: int = 16, held_back: int = 0, patience: PrefetchPolicy = PATIENCE
    ) -> None:
        geometry = tiny_geometry()
        self.now = 0.0
        self.plane = ControlPlane(
            geometry.groups[0],
            Directory({Tier.HOST: host_pages}),
            WritePolicy.parse("write_through", device_owned=False),
            device_owned=False,
            has_storage=storage,
            clock=lambda: self.now,
        )
        self.space = self.plane.space(namespace(geometry))
        waits = Waits(1.0, patience)
        self.prefixes = Prefixes(self.plane, SHAPE, waits, num_held_back=held_back, clock=lambda: self.now)
        self.keys = HASHES[1::2]

    def fill(self, stop: int, start: int = 0) -> None:
        entries = self.plane.directory.reserve(self.space, self.keys, start, stop, Tier.HOST)
        self.plane.directory.publish(entries, Tier.HOST)

    def state(self, num_tokens: int) -> RequestState:
        hashes = HASHES[: num_tokens // 4]
        return RequestState(SimpleNamespace(request_id="r", num_tokens=num_tokens, block_hashes=hashes))

    def find(self, state: RequestState, num_computed_tokens: int = 0) -> range | None:
        return self.prefixes.find(self.space, state, num_computed_tokens)

    def job(self, kind: JobKind) -> Job:
        (job,) = self.plane.take_jobs()
        assert job.kind is kind
        return job

    def answer(self, job: Job, failed: tuple[int, ...] = ()) -> None:
        self.plane.complete(Completion(job.id, 0, failed, "lost" if failed else None))


@pytest.mark.parametrize(
    ("num_tokens", "computed", "held", "expected"),
    [
        (40, 0, 5, range(9)),  # the block of the last token is computed, though its page is held
        (41, 0, 5, range(10)),
        (47, 0, 5, range(10)),  # the rest of a page is not held
        (41, 12, 5, range(3, 10)),  # a hit of the device that ends inside of a page
        (41, 12, 1, range(3, 3)),
        (41, 0, 0, range(0)),
        (41, 40, 5, range(10, 10)),
        (7, 0, 0, range(0)),
    ],
)
def test_whole_blocks_below_the_last_token_are_loaded(
    num_tokens: int, computed: int, held: int, expected: range
) -> None:
    bench = Bench()
    bench.fill(held)
    assert bench.find(bench.state(num_tokens), computed) == expected


def test_blocks_that_a_drafter_spoils_are_computed() -> None:
    bench = Bench(held_back=1)
    bench.fill(5)
    assert bench.find(bench.state(41)) == range(9)


def test_a_page_that_another_request_offloads_is_waited_for() -> None:
    bench = Bench()
    bench.fill(2)
    job = bench.plane.offload(bench.space, bench.keys, 2, 3, [8, 9])
    state = bench.state(41)
    assert bench.find(state) is None
    assert bench.find(state) is None
    assert job is not None
    bench.answer(job)
    assert bench.find(state) == range(6)


def test_storage_is_asked_once_and_what_it_has_is_fetched_once() -> None:
    bench = Bench(storage=True)
    bench.fill(1)
    bench.plane.take_jobs()
    state = bench.state(41)
    assert bench.find(state) is None
    lookup = bench.job(JobKind.LOOKUP)
    assert lookup.keys == tuple(bench.keys[1:5])
    assert bench.find(state) is None
    assert bench.plane.take_jobs() == []
    bench.answer(lookup, failed=(2, 3))
    assert bench.find(state) is None
    prefetch = bench.job(JobKind.PREFETCH)
    assert prefetch.keys == tuple(bench.keys[1:3])
    bench.answer(prefetch, failed=(1,))
    assert bench.find(state) == range(4)
    assert bench.plane.take_jobs() == []
    counts = SchedulerCounts(bench.plane)
    assert counts.tokens_by_tier(state, range(4), SHAPE) == {Tier.HOST: 8, Tier.STORAGE: 8}


def test_requests_that_ask_the_same_of_storage_share_the_question_and_the_pages() -> None:
    bench = Bench(storage=True)
    states = [bench.state(41) for _ in range(3)]
    assert [bench.find(state) for state in states] == [None] * 3
    bench.answer(bench.job(JobKind.LOOKUP))
    assert [bench.find(state) for state in states] == [None] * 3
    bench.answer(bench.job(JobKind.PREFETCH))
    assert [bench.find(state) for state in states] == [range(10)] * 3


@pytest.mark.parametrize("answered", [False, True])
def test_storage_that_is_late_costs_its_time_limit_and_no_more(answered: bool) -> None:
    bench = Bench(storage=True)
    bench.fill(1)
    bench.plane.take_jobs()
    state = bench.state(41)
    assert bench.find(state) is None
    if answered:
        bench.answer(bench.job(JobKind.LOOKUP))
        assert bench.find(state) is None
    bench.now = 31.0 if answered else 1.0
    assert bench.find(state) == range(2)
    assert state.late
    assert bench.find(state) == range(2)


def test_pages_that_failed_to_load_are_not_loaded_again_until_they_are_new() -> None:
    bench = Bench()
    bench.fill(5)
    bench.prefixes.refuse([bench.keys[2]])
    assert bench.find(bench.state(41)) == range(4)
    bench.prefixes.accept([bench.keys[2]])
    assert bench.find(bench.state(41)) == range(10)


def test_a_request_whose_load_failed_computes() -> None:
    bench = Bench()
    bench.fill(5)
    state = bench.state(41)
    state.loads = False
    assert bench.find(state, 8) == range(2, 2)


def test_a_prefix_longer_than_the_host_tier_is_fetched_as_far_as_it_fits() -> None:
    bench = Bench(storage=True, host_pages=2)
    state = bench.state(41)
    assert bench.find(state) is None
    bench.answer(bench.job(JobKind.LOOKUP))
    assert bench.find(state) is None
    prefetch = bench.job(JobKind.PREFETCH)
    assert prefetch.num_pages == 2
    bench.answer(prefetch)
    assert bench.find(state) == range(4)
    bench.plane.audit()


def test_best_effort_computes_at_once_and_has_the_pages_come_for_others() -> None:
    world = Bench(storage=True, patience=PrefetchPolicy(0.0))
    state = world.state(33)
    assert world.find(state) is None
    world.answer(world.job(JobKind.LOOKUP))
    assert world.find(state) == range(0)
    assert state.late
    fetched = world.job(JobKind.PREFETCH)
    world.answer(fetched)
    assert world.find(world.state(33)) == range(8)


def test_a_request_waits_so_long_for_each_page() -> None:
    world = Bench(storage=True, patience=PrefetchPolicy(1.0, 0.5))
    state = world.state(33)
    assert world.find(state) is None
    world.answer(world.job(JobKind.LOOKUP))
    assert world.find(state) is None
    assert world.job(JobKind.PREFETCH).num_pages == 4
    world.now = 2.9
    assert world.find(state) is None
    world.now = 3.0
    assert world.find(state) == range(0)


def announced(bench: Bench, num_tokens: int, num_announced: int) -> RequestState:
    state = bench.state(num_tokens)
    state.announced_tokens = num_announced
    return state


def test_announced_pages_are_asked_for_again_as_long_as_some_come() -> None:
    bench = Bench(storage=True)
    state = announced(bench, 41, 32)
    for held in range(1, 5):  # one page comes every 0.9 s, and after the fourth nothing more was announced
        for _ in range(2):
            assert bench.find(state) is None
            bench.answer(bench.job(JobKind.LOOKUP), failed=tuple(range(6 - held)))
            assert bench.find(state) is None
            assert bench.plane.take_jobs() == [], "not at once"
            bench.now += 0.45
        assert bench.find(state) is None
        bench.answer(bench.job(JobKind.LOOKUP), failed=tuple(range(1, 6 - held)))
        assert bench.find(state) is None
        bench.answer(bench.job(JobKind.PREFETCH))
        bench.now += 0.02
    assert bench.find(state) == range(8)
    assert bench.plane.take_jobs() == []
    counts = SchedulerCounts(bench.plane)
    assert counts.tokens_by_tier(state, range(8), SHAPE) == {Tier.STORAGE: 32}


def test_announced_pages_that_do_not_come_are_computed_when_the_wait_is_over() -> None:
    bench = Bench(storage=True)
    state = announced(bench, 41, 32)
    assert bench.find(state) is None
    bench.answer(bench.job(JobKind.LOOKUP), failed=(0, 1, 2, 3, 4))
    assert bench.find(state) is None
    bench.now = 1.0
    assert bench.find(state) == range(0)
    assert bench.plane.take_jobs() == []


def test_an_answer_that_is_fresh_keeps_nobody_from_asking_for_what_was_announced_since() -> None:
    bench = Bench(storage=True)
    assert bench.find(bench.state(41)) is None
    bench.answer(bench.job(JobKind.LOOKUP), failed=(0, 1, 2, 3, 4))
    assert bench.find(announced(bench, 41, 32)) is None
    bench.answer(bench.job(JobKind.LOOKUP))
