"""Prefetches under vLLM's scheduler that stop to pay: cancelled where nobody waits, and counted for what they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import SimEngine, prompt_of
from vllm_harness_faults import Gate, store_faults
from vllm_harness_kvhoist import assert_nothing_kept, audit, end, parts_of, settle, side, store_in, wait_for

Sim = Callable[..., SimEngine]
PROMPTS = {name: prompt_of(name, 33) for name in "ab"}
PAGES = 4
"""Of each prompt that can be loaded."""


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Reads of stores wait in it while it is closed."""
    made = Gate()
    with store_faults("get", made):
        yield made
        made.open()


@pytest.fixture
def start(sim: Sim, tmp_path: Path) -> Callable[..., SimEngine]:
    """Start an engine with one I/O thread over a store that holds all prompts."""

    def make(**options: Any) -> SimEngine:
        ranks = {name: options.pop(name) for name in ("tp", "pp") if name in options}
        settings = {"storage": store_in(tmp_path), "io_threads": 1, "lookup_timeout_s": 30}
        engine = sim(settings, **ranks)
        for prompt in PROMPTS.values():
            engine.ask(prompt, 1)
        end(engine)
        return sim(settings | options, **ranks)

    return make


def counted(engine: SimEngine) -> dict[str, int]:
    return {name: pages for name, pages in side(engine).plane.prefetch_stats().by_outcome().items() if pages}


def prefetching(engine: SimEngine, gate: Gate, num_jobs: int) -> bool:
    """Tell whether so many prefetches are ordered, and the first one is being read on each rank."""
    jobs = [job for job in side(engine).plane.tracker.jobs() if job.kind == "prefetch"]
    return len(jobs) == num_jobs and gate.waiting == len(engine.workers)


def step_until(engine: SimEngine, condition: Callable[[], bool], what: str) -> None:
    def stepped() -> bool:
        engine.step()
        return condition()

    wait_for(stepped, what)


@pytest.mark.parametrize("ranks", [{}, {"tp": 2}])
def test_an_abort_cancels_what_has_not_begun(
    start: Callable[..., SimEngine], gate: Gate, ranks: dict[str, int]
) -> None:
    engine = start(**ranks)
    gate.close()
    first, second = engine.add(PROMPTS["a"], 2), engine.add(PROMPTS["b"], 2)
    step_until(engine, lambda: prefetching(engine, gate, 2), "both wait for their pages")
    engine.abort(second)
    step_until(engine, lambda: counted(engine).get("cancelled") == PAGES, "the second is cancelled")
    gate.open()
    settle(engine)
    assert engine.told[first].num_external == 32
    assert counted(engine) == {"asked": 2 * PAGES, "hit": PAGES, "cancelled": PAGES}
    assert engine.ask(PROMPTS["b"], 2).num_external == 32, "storage has it still, and is asked at once"
    assert_nothing_kept(engine)


def test_a_prefetch_for_which_another_request_waits_is_not_cancelled(
    start: Callable[..., SimEngine], gate: Gate
) -> None:
    engine = start()
    gate.close()
    engine.add(PROMPTS["a"], 2)
    pair = [engine.add(PROMPTS["b"], 2), engine.add([*PROMPTS["b"], 1], 2)]
    step_until(engine, lambda: prefetching(engine, gate, 2), "all wait for their pages")
    for _ in range(3):  # so that both have joined it
        engine.step()
    engine.abort(pair[0])
    for _ in range(3):
        engine.step()
    gate.open()
    settle(engine)
    assert engine.told[pair[1]].num_external == 32
    assert "cancelled" not in counted(engine)


def test_what_is_late_is_cancelled_as_far_as_it_has_not_begun(start: Callable[..., SimEngine], gate: Gate) -> None:
    engine = start(prefetch_timeout_s=0.2)
    gate.close()
    names = [engine.add(prompt, 2) for prompt in PROMPTS.values()]
    step_until(engine, lambda: prefetching(engine, gate, 2), "both wait for their pages")
    engine.run(lambda: all(engine.told[name].is_over for name in names))
    assert gate.waiting == 1
    gate.open()
    settle(engine)
    assert counted(engine) == {"asked": 2 * PAGES, "late": PAGES, "cancelled": PAGES}
    assert_nothing_kept(engine)
    assert counted(engine) == {"asked": 2 * PAGES, "late": PAGES, "cancelled": PAGES, "useless": PAGES}


def test_a_reset_cancels_what_requests_waited_for(start: Callable[..., SimEngine], gate: Gate) -> None:
    engine = start()
    gate.close()
    names = [engine.add(prompt, 2) for prompt in PROMPTS.values()]
    step_until(engine, lambda: prefetching(engine, gate, 2), "both wait for their pages")
    assert engine.reset(connector=True)
    step_until(engine, lambda: counted(engine).get("cancelled") == PAGES, "what has not begun is cancelled")
    gate.open()
    settle(engine)
    assert [engine.told[name].num_external or 0 for name in names] == [0, 0]


def test_best_effort_never_waits_and_its_pages_serve_later_requests(
    start: Callable[..., SimEngine], gate: Gate
) -> None:
    engine = start(prefetch_policy="best_effort")
    gate.close()
    assert engine.ask(PROMPTS["a"], 2).num_external == 0
    gate.open()
    settle(engine)
    assert counted(engine) == {"asked": PAGES, "late": PAGES}


@pytest.mark.parametrize("ranks", [{}, {"tp": 2}])
def test_what_came_is_loaded_though_storage_hangs_in_one_page(
    start: Callable[..., SimEngine], ranks: dict[str, int]
) -> None:
    """In the third page of the prompt, and on the last rank only."""
    engine = start(io_threads=4, prefetch_policy="wait_complete", **ranks)
    last = parts_of(engine)[-1]
    for part in parts_of(engine):
        part.stores.current.io._breaker._hang_s = 0.1
    gate = Gate()
    gate.close()

    name = engine.add(PROMPTS["a"], 2)
    third = engine.scheduler.requests[name].block_hashes[5]

    def hang(keys: Any, blobs: Any) -> None:
        if third in [key.page.chain_hash for key in keys] and keys[0].shard.rank == last._mover.rank:
            gate()

    with store_faults("get", hang):
        engine.run(lambda: engine.told[name].is_over)
        assert engine.told[name].num_external == 16
        assert gate.waiting == 1
        audit(engine)
        gate.open()
        settle(engine)
    assert engine.reset()
    assert engine.ask(PROMPTS["a"], 2).num_external == 32


def test_the_metrics_have_them(start: Callable[..., SimEngine]) -> None:
    engine = start()
    engine.ask(PROMPTS["a"], 2)
    settle(engine)
    told: dict[str, float] = dict(side(engine).counts._told)
    page_bytes = side(engine).plane.group.page_bytes
    assert (told["prefetch_pages.asked"], told["prefetch_pages.hit"]) == (PAGES, PAGES)
    assert told["prefetch_bytes.hit"] == PAGES * page_bytes
