"""Storage under vLLM's scheduler: restarts hit, idle engines drain, and no store, slow, stuck, failing or wrong, makes
a step wait or a request fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import SimEngine, prompt_of
from vllm_harness_faults import Gate, copy_faults, corrupt_folder, store_faults
from vllm_harness_kv import HAS_LAYOUTS
from vllm_harness_kvhoist import assert_nothing_kept, end, host_pages, num_jobs, parts_of, settle, store_in, wait_for

from kvhoist.errors import StorageError
from kvhoist.messages import JobKind

Sim = Callable[..., SimEngine]
PROMPT = prompt_of("a", 33)
RANKS: list[dict[str, int]] = [{}, {"tp": 2}, *([{"tp": 2, "pp": 2}] if HAS_LAYOUTS else [])]


def stored(engine: SimEngine) -> list[int]:
    """Pages that each rank has stored."""
    return [part.stores.current.store.stats().put_pages for part in parts_of(engine)]


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_a_restarted_engine_hits_from_disk(sim: Sim, tmp_path: Path, ranks: dict[str, int], layerwise: bool) -> None:
    settings = {"storage": store_in(tmp_path), "layerwise": layerwise}
    engine = sim(settings, **ranks)
    for i in range(4):
        engine.ask(prompt_of(str(i), 37), 6)
    end(engine)

    engine = sim(settings, **ranks)
    for i in range(4):
        told = engine.ask(prompt_of(str(i), 37), 6)
        assert (told.num_local, told.num_external) == (0, 32)
    assert num_jobs(engine, JobKind.PREFETCH) == 4
    assert engine.ask(prompt_of("other", 37), 2).num_external == 0


def test_a_read_only_store_gives_hits_and_counts_no_failed_writes(sim: Sim, tmp_path: Path) -> None:
    engine = sim({"storage": store_in(tmp_path)})
    engine.ask(prompt_of("a", 37), 6)
    end(engine)
    engine = sim({"storage": store_in(tmp_path) + "&read_only=true"})
    told = engine.ask(prompt_of("a", 37), 6)
    assert (told.num_local, told.num_external) == (0, 32)
    engine.ask(prompt_of("b", 37), 6)
    settle(engine)
    assert num_jobs(engine, JobKind.PERSIST) == 0
    assert engine.reset()
    assert engine.ask(prompt_of("b", 37), 6).num_external == 32
    assert_nothing_kept(engine)


def test_an_idle_engine_drains_to_storage_without_a_further_step(sim: Sim, tmp_path: Path) -> None:
    engine = sim({"storage": store_in(tmp_path)}, tp=2)
    for i in range(3):
        engine.add(prompt_of(str(i), 33), 8)
    engine.run()
    assert not engine.has_work
    # 40 tokens each were computed: 5 pages, of which the last is offered by the step after the last request's end.
    wait_for(lambda: stored(engine) == [15, 15], "all pages are stored")


def test_a_shutdown_right_after_the_last_request_loses_nothing(sim: Sim, tmp_path: Path) -> None:
    engine = sim({"storage": store_in(tmp_path)})
    engine.ask(prompt_of("a", 33), 8)
    engine.run()
    engine.close()
    engine = sim({"storage": store_in(tmp_path)})
    assert engine.ask(prompt_of("a", 41), 1).num_external == 32, "generated tokens differ, the prompt is there"


def test_an_engine_killed_between_steps_leaves_a_folder_that_serves(sim: Sim, tmp_path: Path) -> None:
    engine = sim({"storage": store_in(tmp_path)})
    for i in range(8):
        engine.add(prompt_of(str(i), 33), 8)
    for _ in range(12):
        engine.step()
    engine.close()
    engine = sim({"storage": store_in(tmp_path)})
    for i in range(8):
        engine.ask(prompt_of(str(i), 33), 8)


def test_a_lookup_never_blocks_a_step(sim: Sim, tmp_path: Path) -> None:
    """While storage does not answer, others run at full speed, and the request that waits is computed in the end."""
    engine = sim({"storage": store_in(tmp_path), "lookup_timeout_s": 0.3})
    gate = Gate()
    with store_faults("exists", gate):
        gate.close()
        waiting = engine.add(PROMPT, 4)
        short = engine.add(prompt_of("short", 5), 40)  # no whole page: nothing to ask storage for
        started = time.monotonic()
        engine.run(lambda: engine.told[short].is_over)
        assert gate.waiting > 0
        if time.monotonic() - started < 0.3:
            assert not engine.told[waiting].tokens, "it waits for the answer"
        engine.run(lambda: engine.told[waiting].is_over)
        assert gate.waiting > 0, "nobody has answered yet"
        gate.open()
        settle(engine)


@pytest.mark.parametrize("method", ["get", "exists"])
def test_what_storage_brings_too_late_is_recomputed_and_serves_the_next(sim: Sim, tmp_path: Path, method: str) -> None:
    settings: dict[str, Any] = {"storage": store_in(tmp_path), "lookup_timeout_s": 0.1, "prefetch_timeout_s": 0.1}
    engine = sim(settings)
    engine.ask(PROMPT, 1)
    end(engine)
    engine = sim(settings)
    gate = Gate()
    with store_faults(method, gate):
        gate.close()
        assert engine.ask(PROMPT, 2).num_external == 0
        gate.open()
        settle(engine)
    assert engine.reset()
    assert engine.ask(PROMPT, 2).num_external == 32


def test_64_requests_that_only_storage_can_serve_cause_one_prefetch_and_one_load(sim: Sim, tmp_path: Path) -> None:
    settings = {"storage": store_in(tmp_path), "lookup_timeout_s": 30}
    engine = sim(settings, blocks=48)
    engine.ask(prompt_of("a", 64), 1)
    end(engine)
    engine = sim(settings, blocks=48)
    names = [engine.add([*prompt_of("a", 64), i], 2) for i in range(64)]
    settle(engine)
    assert (num_jobs(engine, JobKind.PREFETCH), num_jobs(engine, JobKind.LOAD)) == (1, 1)
    assert num_jobs(engine, JobKind.LOOKUP) == 1
    hits = [(engine.told[name].num_local or 0) + (engine.told[name].num_external or 0) for name in names]
    assert hits == [64] * 64


@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_a_corrupted_folder_is_a_miss_that_is_stored_anew(sim: Sim, tmp_path: Path, ranks: dict[str, int]) -> None:
    settings = {"storage": store_in(tmp_path)}
    engine = sim(settings, **ranks)
    engine.ask(PROMPT, 3)
    end(engine)
    assert corrupt_folder(tmp_path) > 0

    engine = sim(settings, **ranks)
    assert engine.ask(PROMPT, 3).num_external == 0
    end(engine)
    engine = sim(settings, **ranks)
    assert engine.ask(PROMPT, 3).num_external == 32


def test_a_page_that_one_rank_lacks_is_a_miss_of_that_page_on_all(sim: Sim, tmp_path: Path) -> None:
    settings = {"storage": store_in(tmp_path)}
    engine = sim(settings, tp=2)
    engine.ask(PROMPT, 1)
    settle(engine)
    third = chain_of(engine, PROMPT)[2]
    store = parts_of(engine)[1].stores.current.store
    [removed] = [key for key, _ in store.records() if key.shard.rank == 1 and key.page.chain_hash == third]
    assert store.remove([removed]) == 1
    end(engine)

    engine = sim(settings, tp=2)
    assert engine.ask(PROMPT, 1).num_external == 16


def chain_of(engine: SimEngine, prompt: list[int]) -> list[bytes]:
    """The chain hash of each whole page of a prompt."""
    name = engine.add(prompt, 1)
    hashes = list(engine.scheduler.requests[name].block_hashes)
    engine.run()
    return hashes[1::2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_prefetch_that_fails_on_one_rank_is_recomputed(sim: Sim, tmp_path: Path, rank: int) -> None:
    settings = {"storage": store_in(tmp_path)}
    engine = sim(settings, tp=2)
    engine.ask(PROMPT, 1)
    end(engine)

    def fail(keys: Any, *_: Any) -> Any:
        return [None] * len(keys) if keys[0].shard.rank == rank else None

    engine = sim(settings, tp=2)
    with store_faults("get", fail):
        assert engine.ask(PROMPT, 5).num_external == 0
        settle(engine)
    assert engine.reset()
    assert engine.ask(PROMPT, 5).num_external == 32, "the host tier has it since"


@pytest.mark.parametrize("method", ["put", "get", "exists"])
def test_a_store_that_raises_costs_hits_and_nothing_else(sim: Sim, tmp_path: Path, method: str) -> None:
    settings = {"storage": store_in(tmp_path)}
    engine = sim(settings)
    engine.ask(prompt_of("before", 33), 1)
    end(engine)

    def broken(*_: Any) -> Any:
        raise StorageError("planted")

    engine = sim(settings)
    with store_faults(method, broken):
        for i in range(5):
            engine.ask(prompt_of(str(i), 33), 3)
        engine.ask(prompt_of("before", 33), 1)
        settle(engine)
    assert engine.reset()
    assert engine.ask(prompt_of("4", 33), 3).num_external == 32


def test_a_stuck_store_holds_back_neither_requests_nor_host_pages_for_ever(sim: Sim, tmp_path: Path) -> None:
    """Host pages that wait to be stored are pinned. With a store that takes nothing the cache still serves."""
    engine = sim({"storage": store_in(tmp_path), "max_queued_pages": 4, "io_threads": 2}, pages=24)
    gate = Gate()
    with store_faults("put", gate):
        gate.close()
        for i in range(20):
            engine.ask(prompt_of(str(i), 33), 2)
        assert engine.reset()
        assert (engine.ask(prompt_of("19", 33), 2).num_external or 0) > 0
        gate.open()
        settle(engine)
    assert_nothing_kept(engine)


def test_a_full_disk_budget_evicts_and_goes_on(sim: Sim, tmp_path: Path) -> None:
    engine = sim({"storage": store_in(tmp_path, "256KiB")}, pages=8)
    for i in range(39):
        engine.ask(prompt_of(str(i), 33), 2)
    settle(engine)  # pages that wait to be written hold the few host pages
    engine.ask(prompt_of("39", 33), 2)
    settle(engine)
    assert engine.reset()
    assert engine.ask(prompt_of("39", 33), 2).num_external == 32


def test_a_shutdown_while_the_store_is_stuck_ends_in_time(sim: Sim, tmp_path: Path) -> None:
    engine = sim({"storage": store_in(tmp_path), "drain_timeout_s": 4.0})
    gate = Gate()
    with store_faults("put", gate):
        gate.close()
        engine.ask(PROMPT, 2)
        engine.run(lambda: gate.waiting > 0)
        started = time.monotonic()
        engine.close()
        assert 4 <= time.monotonic() - started < 7.5, "drain_timeout_s is for all of the shutdown"
        gate.open()


def test_a_slow_offload_is_persisted_when_it_arrives(sim: Sim, tmp_path: Path) -> None:
    engine = sim({"storage": store_in(tmp_path)})
    gate = Gate()
    with copy_faults(gate, kinds=[JobKind.OFFLOAD]):
        gate.close()
        engine.ask(PROMPT, 2)
        engine.run()
        assert stored(engine) == [0]
        gate.open()
        wait_for(lambda: stored(engine) == [4], "the idle engine drains")
    settle(engine)
    assert host_pages(engine) == 4
