"""Copies that fail, on one rank or all, in the batch or outside of it: recomputed, and nothing wrong is offered."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from vllm_harness import SimEngine, generate, prompt_of
from vllm_harness_faults import Gate, copy_faults, corrupt_host_pages, slow_copies
from vllm_harness_kv import HAS_LAYOUTS
from vllm_harness_kvhoist import (
    audit,
    end,
    host_bytes,
    host_pages,
    movers,
    num_jobs,
    parts_of,
    settle,
    side,
    threads_of,
)

from kvhoist.adapters.vllm import prefixes, start
from kvhoist.errors import HostMemoryError, KvhoistError
from kvhoist.messages import Job, JobKind

Sim = Callable[..., SimEngine]
PROMPT = prompt_of("a", 33)


class Fails:
    """Lets pages of copies fail on one rank (None: on all), as long as it is told to."""

    def __init__(self, pages: Sequence[int] | None, rank: int | None = None) -> None:
        self.pages = pages
        self.rank = rank
        self.active = True
        self.num_failed = 0

    def __call__(self, job: Job, rank: int) -> Sequence[int] | None:
        if not self.active or self.rank not in (None, rank):
            return None
        failed = [i for i in range(job.num_pages) if self.pages is None or i in self.pages]
        self.num_failed += len(failed)
        return failed


def raises(job: Job, rank: int) -> Sequence[int] | None:
    raise OSError("planted")


def primed(sim: Sim, prompts: Sequence[str] = ("a",), **options: Any) -> SimEngine:
    """An engine whose host tier holds 4 pages of each prompt and whose device has forgotten them."""
    engine = sim(**options)
    for name in prompts:
        engine.ask(prompt_of(name, 33), 1)
    settle(engine)
    assert engine.reset()
    return engine


RANKS = [{}, {"tp": 2}, *([{"pp": 2, "late": True}] if HAS_LAYOUTS else [])]
WAYS: list[dict[str, Any]] = [
    {},
    {"extra": {"layerwise": True}},
    {"async_scheduling": True, "late": True},
    {"extra": {"layerwise": True}, "async_scheduling": True, "late": True},
]


@pytest.mark.parametrize("pages", [[0], [1, 2], [3], None], ids=str)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_load_that_fails_is_recomputed(sim: Sim, way: dict[str, Any], pages: list[int] | None) -> None:
    engine = primed(sim, **way)
    fails = Fails(pages)
    with copy_faults(fails, kinds=[JobKind.LOAD]):
        engine.ask(PROMPT, 9)
        assert fails.num_failed == (4 if pages is None else len(pages)), "the same pages are not tried again"
        settle(engine)
    audit(engine)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_page_that_failed_to_load_is_not_tried_again_at_once(sim: Sim, way: dict[str, Any]) -> None:
    engine = primed(sim, **way)
    fails = Fails([1])
    with copy_faults(fails, kinds=[JobKind.LOAD]):
        engine.ask(PROMPT, 1)
        for _ in range(3):
            settle(engine)
            assert engine.reset()
            assert engine.ask(PROMPT, 1).num_external == 8
    assert fails.num_failed == 1


def test_a_page_that_failed_to_load_is_tried_again_later(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of the copying must not cut a prefix short for as long as it is in use."""
    monkeypatch.setattr(prefixes, "_REFUSED_S", 0.0)
    engine = primed(sim)
    with copy_faults(Fails([1]), kinds=[JobKind.LOAD]):
        engine.ask(PROMPT, 1)
        settle(engine)
    assert engine.reset()
    assert engine.ask(PROMPT, 1).num_external == 32


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("ranks", RANKS[1:], ids=str)
@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_that_fails_on_one_rank_is_recomputed_on_all(
    sim: Sim, ranks: dict[str, Any], rank: int, layerwise: bool
) -> None:
    engine = primed(sim, extra={"layerwise": layerwise}, **ranks)
    with copy_faults(Fails([1], rank), kinds=[JobKind.LOAD]):
        engine.ask(PROMPT, 9)
        settle(engine)
    assert engine.reset()
    engine.ask(PROMPT, 9)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_copy_that_raises_is_recomputed(sim: Sim, way: dict[str, Any]) -> None:
    engine = primed(sim, **way)
    with copy_faults(raises, kinds=[JobKind.LOAD]):
        engine.ask(PROMPT, 9)
        settle(engine)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_many_requests_on_a_prefix_whose_load_fails_all_end(sim: Sim, way: dict[str, Any]) -> None:
    engine = primed(sim, blocks=64, **way)
    with slow_copies(1), copy_faults(Fails([1, 3]), kinds=[JobKind.LOAD]):
        for i in range(12):
            engine.add([*PROMPT, i], 6)
        settle(engine)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_was_computed_over_a_failed_load_is_offered_to_nobody(sim: Sim, way: dict[str, Any]) -> None:
    """A step that read blocks which a load had not brought computed wrong KV: dropped, or computed anew, before it is
    offered."""
    engine = primed(sim, ["a", "b"], **way)
    fails = Fails([0])
    longer = {name: prompt_of(name, 33) + prompt_of("more", 30) for name in ("a", "b")}
    with copy_faults(fails, kinds=[JobKind.LOAD]):
        for name in ("a", "b"):
            engine.add(longer[name], 9)
        settle(engine)
        assert fails.num_failed > 0
        fails.active = False
        for name in ("a", "b"):
            assert engine.reset()
            engine.ask(longer[name] + generate(longer[name], 9), 2)


@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_an_offload_that_fails_on_one_rank_is_visible_on_none(sim: Sim, ranks: dict[str, Any]) -> None:
    engine = sim(**ranks)
    last = engine.setup.tp * engine.setup.pp - 1
    with copy_faults(Fails([1], last), kinds=[JobKind.OFFLOAD]):
        engine.ask(PROMPT, 1)
        settle(engine)
    assert host_pages(engine) == 3
    assert engine.reset()
    assert engine.ask(PROMPT, 1).num_external == 8
    settle(engine)
    assert engine.reset()
    assert engine.ask(PROMPT, 1).num_external == 32, "the page was offered again"


def test_offloads_that_all_fail_leave_an_engine_without_hits(sim: Sim) -> None:
    engine = sim(tp=2)
    with copy_faults(raises, kinds=[JobKind.OFFLOAD]):
        for i in range(10):
            engine.ask(prompt_of(str(i), 33), 3)
        settle(engine)
    assert host_pages(engine) == 0
    assert num_jobs(engine, JobKind.OFFLOAD) >= 10


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_debug_verify_recomputes_a_page_that_was_corrupted_in_host_memory(sim: Sim, way: dict[str, Any]) -> None:
    way = {**way, "extra": {**way.get("extra", {}), "debug_verify": True}}
    engine = primed(sim, **way)
    corrupt_host_pages(engine, [1])
    engine.ask(PROMPT, 9)
    settle(engine)
    assert sum(mover.num_mismatches for mover in movers(engine)) == 1


@pytest.mark.parametrize("pages", [0, 8])
def test_a_failed_load_of_an_aborted_request_is_nobodys_business(sim: Sim, pages: int) -> None:
    engine = primed(sim)
    gate = Gate()

    def late_failure(job: Job, rank: int) -> Sequence[int]:
        gate()
        return range(job.num_pages)

    with copy_faults(late_failure, kinds=[JobKind.LOAD]):
        gate.close()
        name = engine.add(PROMPT, 4)
        engine.run(lambda: gate.waiting > 0)
        engine.abort(name)
        for i in range(pages):
            engine.add(prompt_of(str(i), 9), 2)
        for _ in range(3):
            engine.step()
        gate.open()
        settle(engine)
    assert engine.leaked_blocks() == []


def test_nothing_is_left_of_a_closed_engine(sim: Sim) -> None:
    engine = sim({"debug_verify": True})
    for i in range(5):
        engine.ask(prompt_of(str(i), 33), 3)
    alive = [weakref.ref(part) for part in (*parts_of(engine), *movers(engine), side(engine), side(engine).plane)]
    end(engine)
    del engine
    gc.collect()
    # The fixture holds the engine itself, whose connectors must have let go of their sides.
    assert [ref() for ref in alive if ref() is not None] == []


def test_closed_in_the_middle_of_everything(sim: Sim) -> None:
    engine = primed(sim)
    with slow_copies(4, most_s=0.02):
        for i in range(10):
            engine.add([*PROMPT, i], 20)
        for _ in range(15):
            engine.step()
        parts = parts_of(engine)
        engine.close()
    assert not any(part.arena.held_bytes for part in parts)


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"host_byte": 1}, "host_bytes"),
        ({"host_bytes": 10}, "10"),
        ({"write_policy": "write_back"}, "write_back"),
        ({"storage": "tape:/dev/st0"}, "tape"),
        ({"layerwise": "yes"}, "layerwise"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_stops_the_engine_with_one_message_or_leaves_the_cache_off(
    checkpoint: Any, extra: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    settings = {"host_bytes": host_bytes(16), **extra}
    with pytest.raises(KvhoistError, match=told):
        SimEngine(checkpoint, settings)
    with SimEngine(checkpoint, {**settings, "on_error": "disable"}) as engine:
        assert engine.ask(PROMPT, 3).num_external == 0
        assert engine.connector.scheduler_side is None


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_where_one_rank_cannot_start_and_the_cache_is_off_the_others_give_their_memory_and_threads_back(
    checkpoint: Any, bad_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    start_worker = start.start_worker

    def start_some(vllm_config: Any, *more: Any) -> Any:
        if vllm_config.parallel_config.rank == bad_rank:
            raise HostMemoryError("planted")
        return start_worker(vllm_config, *more)

    monkeypatch.setattr(start, "start_worker", start_some)
    with SimEngine(checkpoint, {"host_bytes": host_bytes(16, 2), "on_error": "disable"}, tp=2) as engine:
        assert engine.connector.scheduler_side is None
        other = engine.workers[1 - bad_rank].connector.worker_side
        engine.ask(PROMPT, 3)
        assert [worker.connector.worker_side for worker in engine.workers] == [None, None]
        assert other.arena.held_bytes == 0
        assert not any(thread.is_alive() for thread in threads_of(other))


def test_a_problem_at_the_start_that_is_nobodys_error_leaves_the_cache_off_where_that_was_asked_for(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")

    def no_threads(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(start, "start_worker", no_threads)
    with SimEngine(checkpoint, {"host_bytes": host_bytes(16), "on_error": "disable"}) as engine:
        engine.ask(PROMPT, 3)


def test_the_switch_in_the_environment_turns_everything_off(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHOIST_DISABLE", "1")
    with SimEngine(checkpoint, {"host_bytes": host_bytes(16)}) as engine:
        engine.ask(PROMPT, 3)
        assert engine.reset()
        assert engine.ask(PROMPT, 3).num_external == 0


def test_what_was_computed_over_a_failed_layerwise_load_is_no_local_hit_either(sim: Sim) -> None:
    """Its request ends in that very step, so that nobody computes those blocks again. vLLM would go on finding them."""
    engine = sim({"layerwise": True})
    prompt = prompt_of("a", 33)
    longer = prompt + prompt_of("b", 24)
    engine.ask(prompt, 1)
    settle(engine)
    assert engine.reset()
    with copy_faults(lambda job, rank: [1], kinds=[JobKind.LOAD]):
        engine.abort(engine.add(longer, 5), during_step=True)
        engine.step()
    engine.ask([*longer, 1], 3)  # the harness checks each block that is read
