"""Stores attached to and detached from a running engine: every rank or none, off its steps, and idle engines too."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.engine import EngineCoreRequestType, core
from vllm_harness import SimEngine, prompt_of
from vllm_harness_faults import Gate, store_faults
from vllm_harness_kv import HAS_LAYOUTS
from vllm_harness_kvhoist import host_pages, num_jobs, parts_of, settle, side, store_in, wait_for

from kvhoist.adapters.vllm import compat, stores
from kvhoist.adapters.vllm.worker_stores import WorkerStores
from kvhoist.control.tiers import Tier
from kvhoist.errors import StorageError
from kvhoist.messages import JobKind
from kvhoist.runtime import ask, running

Sim = Callable[..., SimEngine]
RANKS: list[dict[str, int]] = [{}, {"tp": 2}, *([{"tp": 2, "pp": 2}] if HAS_LAYOUTS else [])]
STEPS_WHILE_IDLE = "has_pending_push_work" in vars(KVConnectorBase_V1)
PROMPT = prompt_of("a", 37)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def grant(engine: SimEngine, wish: Callable[[], Any]) -> Any:
    """Run an idle engine's loop until the wish, which another thread has, is granted."""
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(wish)
        while not asked.done():
            if not engine.step() and not STEPS_WHILE_IDLE:
                engine.ask([0], 1)
        return asked.result()


def attach(engine: SimEngine, address: str) -> Any:
    return grant(engine, lambda: side(engine).stores.attach(address))


def detach(engine: SimEngine, *, drain: bool = True, timeout_s: float = 20.0) -> Any:
    return grant(engine, lambda: side(engine).stores.detach(drain=drain, timeout_s=timeout_s))


def num_reads(engine: SimEngine) -> int:
    return num_jobs(engine, JobKind.LOOKUP) + num_jobs(engine, JobKind.PREFETCH)


def only_storage(engine: SimEngine) -> None:
    """Forget what device and host memory hold."""
    settle(engine)
    wait_for(lambda: all(part._mover.wait_idle(1.0) for part in parts_of(engine)), "early writes end")
    side(engine).plane.directory.evict(Tier.HOST, host_pages(engine))
    assert engine.reset()


@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_an_idle_engine_gets_a_store_and_gives_it_back(sim: Sim, tmp_path: Path, ranks: dict[str, int]) -> None:
    engine = sim(**ranks)
    engine.ask(PROMPT, 6)
    settle(engine)
    assert not engine.has_work
    address = store_in(tmp_path)
    assert attach(engine, address) == {"store": f"attached: {address}"}
    engine.ask(prompt_of("b", 37), 6)
    only_storage(engine)
    assert engine.ask(prompt_of("b", 37), 6).num_external == 32
    assert num_jobs(engine, JobKind.PREFETCH) == 1
    assert engine.ask(PROMPT, 6).num_external == 0, "what was computed before was in nobody's store"
    settle(engine)

    report = detach(engine)
    assert (report["store"], report["lost_pages"], report["memory_kept"]) == (address, 0, False)
    assert side(engine).stores.state.startswith(f"no store attached; {address} was detached at ")
    assert all(part.stores.current is None for part in parts_of(engine))
    only_storage(engine)
    assert engine.ask(prompt_of("b", 37), 6).num_external == 0
    assert "no store attached" in str(side(engine).plane.explain(side(engine)._space, [b"x" * 32], 8))
    settle(engine)

    only_storage(engine)
    attach(engine, address)
    assert engine.ask(prompt_of("b", 37), 6).num_external == 32, "the same disk is back, with what it held"


def test_what_the_host_tier_holds_is_written_to_the_new_store_when_it_is_loaded(sim: Sim, tmp_path: Path) -> None:
    engine = sim()
    engine.ask(PROMPT, 6)
    settle(engine)
    attach(engine, store_in(tmp_path))
    assert engine.reset()
    assert engine.ask(PROMPT, 6).num_external == 32
    only_storage(engine)
    assert num_jobs(engine, JobKind.PERSIST) >= 1
    assert engine.ask(PROMPT, 6).num_external == 32
    assert num_jobs(engine, JobKind.PREFETCH) == 1
    wait_for(lambda: bool(parts_of(engine)[0].stores.current.store.namespaces()), "the namespace is noted")


def test_a_store_that_one_rank_cannot_open_is_attached_to_none(
    sim: Sim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    inner = WorkerStores._open

    def open_on_rank_0(self: Any, address: str) -> Any:
        if self._rank == 1:
            raise OSError("no such disk here")
        opened.append(inner(self, address))
        return opened[-1]

    engine = sim(tp=2)
    with monkeypatch.context() as patch:
        patch.setattr(WorkerStores, "_open", open_on_rank_0)
        with pytest.raises(StorageError, match="cannot be attached; got rank 1: OSError: no such disk here"):
            attach(engine, store_in(tmp_path))
    engine.ask(PROMPT, 6)
    settle(engine)
    wait_for(lambda: all(store._let_go.is_set() for store in opened), "rank 0 gives its store up")
    assert len(opened) == 1
    assert all(part.stores.current is None for part in parts_of(engine))
    assert side(engine).stores.state == "no store attached"
    assert num_jobs(engine, JobKind.LOOKUP) == 0
    with pytest.raises(StorageError, match="ConfigError: an unknown kind of store"):
        attach(engine, "nfs:x")
    with pytest.raises(StorageError, match="no store to detach"):
        detach(engine)
    attach(engine, store_in(tmp_path))
    with pytest.raises(StorageError, match="has a store already; got attached: file:"):
        attach(engine, "memory:")


def test_a_slow_opening_stops_no_step_and_a_second_wish_is_refused(
    sim: Sim, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, inner = threading.Event(), WorkerStores._open

    def open_slowly(self: Any, address: str) -> Any:
        assert self._rank == 0 or go_on.wait(30)
        return inner(self, address)

    monkeypatch.setattr(WorkerStores, "_open", open_slowly)
    engine = sim(tp=2)
    asked = pool.submit(side(engine).stores.attach, "memory:")
    wait_for(lambda: side(engine).stores.is_asked, "the wish")
    for i in range(5):
        engine.ask(prompt_of(str(i), 37), 6)
    settle(engine)
    assert not asked.done()
    assert num_jobs(engine, JobKind.LOOKUP) == num_jobs(engine, JobKind.PERSIST) == 0, "not all ranks have it"
    with pytest.raises(StorageError, match="another attach or detach of this engine's store is under way"):
        side(engine).stores.detach(drain=True, timeout_s=1.0)
    go_on.set()
    while not asked.done():
        engine.ask([0], 1)
    assert asked.result() == {"store": "attached: memory:"}


@pytest.mark.parametrize("call", ["put", "get", "exists"])
def test_a_store_that_hangs_at_detach_holds_up_no_request(sim: Sim, tmp_path: Path, call: str) -> None:
    engine = sim({"storage": store_in(tmp_path), "lookup_timeout_s": 0.2, "prefetch_timeout_s": 0.2}, pages=32)
    engine.ask(PROMPT, 6)
    only_storage(engine)
    gate = Gate()
    with store_faults(call, gate):
        gate.close()
        engine.ask(prompt_of("b", 37) if call != "get" else PROMPT, 6)
        wait_for(lambda: gate.waiting > 0, "a call that hangs")
        report = detach(engine, timeout_s=0.3)
        assert report["memory_kept"]
        for i in range(12):
            engine.ask(prompt_of(str(i), 37), 6)
        engine.run()
        side(engine).plane.audit()
        attach(engine, "memory:")
        engine.ask(prompt_of("c", 37), 6)
        new = parts_of(engine)[0].stores.current.store
        wait_for(lambda: engine.ask([0], 1) and new.stats().put_pages > 0, "a page in the new store")
        gate.open()
        settle(engine)


@pytest.mark.parametrize("ranks", RANKS[:2], ids=str)
def test_stores_come_and_go_under_load_and_every_output_is_right(
    sim: Sim, tmp_path: Path, pool: ThreadPoolExecutor, ranks: dict[str, int]
) -> None:
    engine = sim({"debug_verify": True}, pages=24, **ranks)
    addresses = [store_in(tmp_path / "one"), "memory:?capacity=64KiB", store_in(tmp_path / "two")]
    done = threading.Event()

    def change() -> list[Any]:
        reports = []
        try:
            for turn in range(9):
                side(engine).stores.attach(addresses[turn % 3])
                before = num_reads(engine)
                wait_for(lambda before=before: num_reads(engine) > before + 5, "the store is read")
                if turn == 8:  # until then the stores may have come and gone too soon for that
                    wait_for(lambda: num_jobs(engine, JobKind.PREFETCH) > 0, "a prefetch")
                reports.append(side(engine).stores.detach(drain=turn % 2 == 0, timeout_s=20.0))
        finally:
            done.set()
        return reports

    changes = pool.submit(change)
    turn = 0
    while not done.is_set():
        for _ in range(3):
            engine.add(prompt_of(str(turn % 7), 29 + turn % 9), 4)
            turn += 1
        engine.run()
        engine.reset()
        side(engine).plane.directory.evict(Tier.HOST, 24)
    reports = changes.result()
    assert len(reports) == 9
    assert not any(report["memory_kept"] for report in reports)
    assert num_jobs(engine, JobKind.PREFETCH) > 0, "nothing came from storage: this proves nothing"
    settle(engine)
    assert side(engine).plane.directory.stats().tiers["storage"].ready_pages == 0


def test_an_engine_that_takes_no_step_is_told_of_and_the_wish_is_taken_back(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_ATTACH_S", 0.2)
    engine = sim()
    with pytest.raises(StorageError, match=r"taken no step; got nothing within 0 s\. Nothing has changed"):
        side(engine).stores.attach("memory:")
    engine.ask(PROMPT, 2)
    engine.run()
    assert not side(engine).stores.is_asked
    assert side(engine).stores.state == "no store attached"


@pytest.mark.skipif(not STEPS_WHILE_IDLE, reason="this vLLM takes no step without requests")
def test_an_engine_rests_though_its_wish_ended_while_who_asked_was_about_to_ask_for_a_step(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sim()
    wishes = side(engine).stores
    calls = itertools.count()

    def step_meanwhile() -> float:
        if next(calls) == 1:  # the asker has seen that its wish is not granted
            assert wishes.next_order() is wishes.next_order() is None
        return 0.0

    monkeypatch.setattr(stores, "time", SimpleNamespace(monotonic=step_meanwhile))
    with pytest.raises(StorageError, match="no store to detach"):
        wishes.detach(drain=True, timeout_s=1.0)
    monkeypatch.undo()
    assert not engine.connector.has_pending_push_work()


def test_a_step_looks_at_no_wish_where_there_is_none(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sim()
    attach(engine, "memory:")
    engine.ask([0], 1)
    monkeypatch.delattr(stores.StoreChanges, "next_order")
    engine.ask(PROMPT, 6)
    settle(engine)


def test_a_shutdown_lets_who_waits_go(sim: Sim, pool: ThreadPoolExecutor) -> None:
    engine = sim()
    asked = pool.submit(side(engine).stores.attach, "memory:")
    wait_for(lambda: side(engine).stores.is_asked, "the wish")
    engine.close()
    with pytest.raises(Exception, match="being shut down"):
        asked.result(30)


def test_the_socket_of_an_engine_attaches_and_is_gone_with_it(
    sim: Sim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVHOIST_RUNTIME_DIR", str(tmp_path / "run"))
    engine = sim(tp=2)
    (found,) = running(tmp_path / "run")
    assert (found.status["engine"], found.status["store"]) == ("vllm", "no store attached")
    request = {"do": "attach", "address": store_in(tmp_path / "kv")}
    assert "attached: file:" in grant(engine, lambda: ask(found.path, request, 30))["store"]
    report = grant(engine, lambda: ask(found.path, {"do": "detach", "timeout_s": 10}, 30))
    assert report["memory_kept"] is False
    engine.close()
    assert running(tmp_path / "run") == []


def test_the_loop_of_an_engine_in_a_process_of_its_own_is_found_and_woken() -> None:
    class Loop:
        input_queue: Any

    space: dict[str, Any] = {"__name__": core.__name__, "compat": compat}
    exec("def build(self):\n    return (lambda: compat.engine_waker())()", space)
    loop = Loop()
    loop.input_queue = queue.Queue()
    wake = space["build"](loop)
    wake()
    assert loop.input_queue.get_nowait() == (EngineCoreRequestType.WAKEUP, None)
    assert space["build"](object()) is None, "an engine in the caller's process has no loop that sleeps"
    assert compat.engine_waker() is None
