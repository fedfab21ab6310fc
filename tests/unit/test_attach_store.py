"""A store that is attached to a running cache, and detached: no wrong byte, no lost page, nobody held up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mover_support import until
from support import PAGE_TOKENS, TinyEngine

from kvhoist.config import CacheConfig
from kvhoist.control.explain import MissKind
from kvhoist.errors import ClosedError, ConfigError, StorageError
from kvhoist.messages import JobKind
from kvhoist.storage.file import FileStore
from kvhoist.storage.memory import MemoryStore

LONG = list(range(100, 100 + 10 * PAGE_TOKENS))
PROMPT = [*LONG, 7]
IMPATIENT = CacheConfig(lookup_timeout_s=0.2, acquire_timeout_s=5.0)


class GatedStore(MemoryStore):
    """Lets calls of the kinds `gated` go on only while `gate` is open. Knows which memory it was told of."""

    def __init__(self, *gated: str) -> None:
        super().__init__("8MiB")
        self.gated = gated
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Semaphore(0)
        self.memory: list[tuple[str, int]] = []

    def put(self, *args: Any) -> list[bool]:
        self._pass("put")
        return super().put(*args)

    def get(self, *args: Any) -> list[bytes | None]:
        self._pass("get")
        return super().get(*args)

    def exists(self, *args: Any) -> list[bool]:
        self._pass("exists")
        return super().exists(*args)

    def register(self, memory: memoryview) -> None:
        self.memory.append(("register", memory.nbytes))

    def unregister(self, memory: memoryview) -> None:
        self.memory.append(("unregister", memory.nbytes))

    def _pass(self, call: str) -> None:
        if call in self.gated:
            self.inside.release()
            assert self.gate.wait(30)


def engine_of(store: Any = None, **options: Any) -> TinyEngine:
    return TinyEngine(device_pages=24, host_pages=24, store=store, **{"config": IMPATIENT, **options})


def empty(engine: TinyEngine) -> None:
    """Leave only storage."""
    assert engine.cache.flush(30)
    engine.cache.evict("device", 24)
    engine.cache.evict("host", 24)
    engine.scribble()


def persisted(engine: TinyEngine) -> int:
    assert engine.cache.flush(30)
    return int(engine.cache.stats().jobs["persist"]["pages"])


def test_a_store_attached_at_run_time_is_used_as_one_from_the_start(tmp_path: Path) -> None:
    address = f"file:{tmp_path}?capacity=1MiB"
    with engine_of(address) as first:
        first.run(PROMPT)
    with engine_of() as engine:
        assert engine.cache.stats().store_state == "no store attached"
        engine.cache.attach_store(address)
        assert engine.cache.stats().store_state == f"attached: {address}"
        assert engine.run(PROMPT)["storage"] == 40
        engine.run([9] * 9)
        assert persisted(engine) == 2
        stats = engine.cache.stats()
        assert stats.storage is not None
        assert stats.storage.persisted_pages == 2
        report = engine.cache.detach_store()
        assert (report.store, report.lost_pages, report.hung_pages, report.memory_kept) == (address, 0, 0, False)
        assert engine.cache.stats().storage is None
        assert engine.cache.stats().store is None
        assert engine.cache.stats().store_state.startswith(f"no store attached; {address} was detached at 2")
        empty(engine)
        assert engine.cache.match(PROMPT).num_pages == 0
    FileStore(tmp_path, capacity="1MiB").close()  # which the cache would refuse while it has it open


def test_what_the_host_tier_holds_is_written_to_the_new_store_as_it_is_hit() -> None:
    old, new = MemoryStore("8MiB"), MemoryStore("8MiB")
    with engine_of(old) as engine:
        engine.run(PROMPT)
        engine.run([5] * 9)
        assert persisted(engine) == 12
        engine.cache.detach_store()
        engine.cache.attach_store(new)
        assert persisted(engine) == 12, "nothing is copied that nobody asks for"
        engine.run(PROMPT)
        assert persisted(engine) == 22
        assert (old.stats().num_pages, new.stats().num_pages) == (12, 10)
        assert list(new.namespaces()) == [engine.cache.namespace.digest], "namespaces are noted again"
        empty(engine)
        assert engine.run(PROMPT)["storage"] == 40
        assert engine.cache.match([5] * 9).num_pages == 0, "what the old store holds is no hint for the new one"


def test_a_foreign_engine_s_hits_are_written_to_the_new_store_too() -> None:
    new = MemoryStore("8MiB")
    config = CacheConfig(device_owned=False)
    with engine_of(config=config) as engine:
        for page in range(10):
            engine.compute(LONG, page, page)
        match = engine.cache.match(LONG)
        transfer = engine.cache.write(match, list(range(10)))
        assert transfer is not None
        transfer.result(30)
        engine.cache.attach_store(new)
        transfer = engine.cache.load(engine.cache.match(LONG), list(range(10)))
        assert transfer is not None
        transfer.result(30)
        assert persisted(engine) == 10
        assert new.stats().num_pages == 10


def test_explain_says_that_no_store_is_attached_and_that_one_was() -> None:
    with engine_of() as engine:
        explanation = engine.cache.explain(PROMPT)
        assert not explanation.has_storage
        assert str(explanation).endswith("There is no store attached: only device and host memory are looked at.")
        engine.cache.attach_store(MemoryStore("8MiB"))
        assert "no store" not in str(engine.cache.explain(PROMPT))
        engine.run(PROMPT)
        empty(engine)
        engine.cache.detach_store()
        miss = engine.cache.explain(PROMPT).miss
        assert miss is not None
        assert (miss.kind, miss.tier, miss.reason) == (MissKind.DROPPED, "storage", "storage was detached")


def test_a_second_store_is_refused_until_the_first_is_detached() -> None:
    first = GatedStore()
    with engine_of(first) as engine:
        with pytest.raises(StorageError, match=r"has a store already; got attached: memory\. Detach it first"):
            engine.cache.attach_store("memory:")
        engine.cache.detach_store()
        with pytest.raises(StorageError, match="no store to detach; got no store attached; memory was detached at"):
            engine.cache.detach_store()
        engine.cache.attach_store("memory:")
    nbytes = engine.cache.num_host_pages * engine.geometry.groups[0].page_pitch_bytes
    assert first.memory == [("register", nbytes), ("unregister", nbytes)]


@pytest.mark.parametrize("target", ["nfs:/x", "file:/proc/none/at/all", "memory:?capacity=much"])
def test_a_store_that_cannot_be_opened_changes_nothing(target: str) -> None:
    with engine_of() as engine:
        engine.run(PROMPT)
        before = threading.active_count()
        with pytest.raises((ConfigError, StorageError, OSError)):
            engine.cache.attach_store(target)
        assert threading.active_count() == before
        assert engine.cache.stats().store_state == "no store attached"
        engine.cache.attach_store("memory:")


def test_a_store_that_refuses_the_memory_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses(GatedStore):
        closed = False

        def register(self, memory: memoryview) -> None:
            raise OSError("no pages left to register")

        def close(self) -> None:
            self.closed = True

    store = Refuses()
    monkeypatch.setattr("kvhoist.attached_store.open_store", lambda _: store)
    with engine_of() as engine:
        with pytest.raises(OSError, match="no pages left"):
            engine.cache.attach_store("memory:")
        assert store.closed
        assert engine.cache.stats().store_state == "no store attached"


@pytest.mark.parametrize("slow", ["open", "register"])
def test_a_slow_opening_holds_up_nobody_and_a_cache_may_close_meanwhile(slow: str, monkeypatch) -> None:
    opening, go_on = threading.Event(), threading.Event()

    class Slow(GatedStore):
        def register(self, memory: memoryview) -> None:
            super().register(memory)
            wait("register")

    def wait(what: str) -> None:
        if what == slow:
            opening.set()
            assert go_on.wait(30)

    store = Slow()
    monkeypatch.setattr("kvhoist.attached_store.open_store", lambda _: (wait("open"), store)[1])
    problems: list[BaseException] = []

    def attach() -> None:
        try:
            engine.cache.attach_store("memory:")
        except BaseException as problem:
            problems.append(problem)

    engine = engine_of()
    attaching = threading.Thread(target=attach)
    attaching.start()
    assert opening.wait(30)
    engine.run(PROMPT)
    for call in (lambda: engine.cache.attach_store("memory:"), engine.cache.detach_store):
        with pytest.raises(StorageError, match="another attach or detach of this cache's store is under way"):
            call()
    engine.cache.close()
    go_on.set()
    attaching.join(30)
    assert [type(problem) for problem in problems] == [ClosedError]
    assert [what for what, _ in store.memory] == (["register", "unregister"] if slow == "register" else [])
    until(lambda: engine.cache._binding.arena.held_bytes == 0, "the host tier's end")


@pytest.mark.parametrize("drain", [True, False])
def test_what_is_on_its_way_is_finished_or_cancelled(drain: bool) -> None:
    store = GatedStore("put")
    config = CacheConfig(lookup_timeout_s=0.2, io_threads=2)  # of which one writes, two pages at a time
    with engine_of(store, config=config) as engine:
        engine.run([3] * 5)
        assert persisted(engine) == 1
        store.gate.clear()
        for first in range(5):
            engine.run(list(range(first * 100, first * 100 + 9)))
        waiting = 8
        until(lambda: engine.cache.stats().storage.queued_pages == waiting)
        threading.Timer(0.1, store.gate.set).start()
        report = engine.cache.detach_store(drain=drain, timeout_s=30)
        assert not report.memory_kept
        assert (report.persisted_pages, report.lost_pages) == ((10, 0) if drain else (10 - waiting, waiting))
        assert engine.cache.flush(30)
        assert engine.cache.stats().open_jobs == 0
        assert store.stats().num_pages == 1 + report.persisted_pages
        tiers = engine.cache.stats().directory.tiers
        assert tiers["storage"].ready_pages == 0, "what the jobs under way wrote is no hint"


@pytest.mark.parametrize("call", ["put", "get", "exists"])
def test_a_store_that_hangs_at_detach_keeps_its_pages_and_nothing_else(call: str) -> None:
    store = GatedStore(call)
    engine = engine_of(store, config=CacheConfig(lookup_timeout_s=0.1, acquire_timeout_s=0.1))
    if call == "get":
        engine.run(PROMPT)
        empty(engine)
    store.gate.clear()
    engine.run(PROMPT)
    assert store.inside.acquire(timeout=30)
    report = engine.cache.detach_store(timeout_s=0.2)
    assert report.memory_kept
    assert report.hung_pages == (0 if call == "exists" else 10)
    assert [what for what, _ in store.memory] == ["register"]
    held = [job for job in engine.cache._plane.tracker.jobs() if job.kind in (JobKind.PERSIST, JobKind.PREFETCH)]
    pages = {page for job in held for page in job.host_pages}
    assert bool(pages) == (call != "exists")
    new = MemoryStore("8MiB")
    engine.cache.attach_store(new)
    engine.run([8] * 9)
    until(lambda: new.stats().num_pages >= 2, "the persist into the new store")
    engine.cache.evict("host", 24)
    engine.cache.audit()
    free = engine.cache.stats().directory.tiers["host"].free_pages
    assert free <= 24 - len(pages), "the hung call may still use its pages"
    store.gate.set()
    until(lambda: [what for what, _ in store.memory] == ["register", "unregister"], "the end of the hung call")
    assert engine.cache.flush(30)
    engine.cache.evict("device", 24)
    engine.cache.evict("host", 24)
    tiers = engine.cache.stats().directory.tiers
    assert (tiers["host"].free_pages, tiers["device"].free_pages) == (24, 24)
    assert engine.cache.match([8] * 9).num_pages == 2
    engine.cache.audit()
    assert not engine.cache.close().memory_kept


@pytest.mark.parametrize("act", ["detach_store", "close"])
def test_a_callback_in_a_thread_of_the_store_s_may_end_its_use(act: str) -> None:
    engine = engine_of(MemoryStore("8MiB"))
    engine.run(PROMPT)
    empty(engine)
    coming = engine.cache.prefetch(engine.cache.match(PROMPT))
    assert coming is not None
    reports: list[Any] = []
    coming.add_done_callback(lambda _: reports.append(getattr(engine.cache, act)(timeout_s=20)))
    until(lambda: bool(reports), "it does not wait for itself")
    assert not reports[0].memory_kept
    assert reports[0].seconds < 10
    engine.cache.close()


def test_no_time_at_all_is_enough_where_nothing_hangs() -> None:
    with engine_of(MemoryStore("8MiB")) as engine:
        engine.run(PROMPT)
        assert not engine.cache.detach_store(drain=False, timeout_s=0).memory_kept


def test_a_cache_closed_while_a_detached_store_hangs_keeps_the_memory_mapped() -> None:
    store = GatedStore("put")
    engine = engine_of(store)
    store.gate.clear()
    engine.run(PROMPT)
    assert store.inside.acquire(timeout=30)
    assert engine.cache.detach_store(timeout_s=0.1).memory_kept
    assert engine.cache.close(drain=False, timeout_s=0.2).memory_kept
    assert not engine.cache._binding.arena.closed
    store.gate.set()
    until(lambda: [what for what, _ in store.memory] == ["register", "unregister"], "the end of the hung call")


@pytest.mark.parametrize("where", ["plane", "mover"])
def test_an_attach_that_fails_in_the_middle_leaves_no_store_and_every_page(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    with engine_of(None) as engine:
        engine.run(PROMPT)
        binding = engine.cache._binding
        with monkeypatch.context() as planted:
            planted.setattr(
                *{"plane": (binding.plane, "attach_storage"), "mover": (binding.mover, "attach")}[where], fail
            )
            with pytest.raises(RuntimeError, match="planted"):
                engine.cache.attach_store(MemoryStore("8MiB"))
        assert engine.cache.stats().store_state == "no store attached"
        assert not binding.plane.has_storage
        engine.run([9, *PROMPT])
        assert engine.cache.flush(30)
        engine.cache.audit()
        store = MemoryStore("8MiB")
        engine.cache.attach_store(store)
        engine.run([8, *PROMPT])
        until(lambda: store.stats().num_pages > 0)


@contextmanager
def swapped_while_it_hangs() -> Iterator[tuple[Any, GatedStore, MemoryStore]]:
    """An engine whose store was detached while a put of PROMPT's pages hangs in it, and the new store in its place."""
    old, new = GatedStore("put"), MemoryStore("8MiB")
    with engine_of(old, config=CacheConfig(lookup_timeout_s=0.1, acquire_timeout_s=0.1)) as engine:
        old.gate.clear()
        engine.run(PROMPT)
        assert old.inside.acquire(timeout=30)
        assert engine.cache.detach_store(timeout_s=0.1).memory_kept
        engine.cache.attach_store(new)
        yield engine, old, new


def test_a_new_store_can_be_cleared_though_a_write_to_the_old_one_hangs() -> None:
    with swapped_while_it_hangs() as (engine, old, new):
        engine.run([8] * 9)
        until(lambda: new.stats().num_pages == 2)
        engine.cache.clear(storage=True)
        assert new.stats().num_pages == 0
        old.gate.set()


def test_an_answer_of_the_old_store_says_nothing_of_the_new_one() -> None:
    with swapped_while_it_hangs() as (engine, old, new):
        old.gate.set()
        assert engine.cache.flush(30)
        assert old.stats().num_pages > 0
        assert engine.cache.stats().directory.tiers["storage"].ready_pages == new.stats().num_pages == 0
        engine.run(PROMPT)
        assert engine.cache.flush(30)
        assert new.stats().num_pages == 10, "a page whose old write hung is written to the new store"


def test_a_match_made_before_the_detach_gives_a_shorter_lease() -> None:
    with engine_of(MemoryStore("8MiB")) as engine:
        engine.run(PROMPT)
        empty(engine)
        match = engine.cache.match(PROMPT)
        assert match.pages_by_tier["storage"] == 10
        engine.cache.detach_store()
        with engine.cache.acquire(match) as lease:
            assert lease.num_pages == 0
        assert sum(engine.run(PROMPT).values()) == 0


def test_a_subscriber_hears_that_pages_left_storage_and_may_not_detach() -> None:
    with engine_of(MemoryStore("8MiB")) as engine:
        engine.run(PROMPT)
        assert engine.cache.flush(30)
        gone: list[bytes] = []
        refused: list[Exception] = []

        def hear(event: Any) -> None:
            if event.kind == "removed" and str(event.tier) == "storage":
                gone.extend(event.keys)
                try:
                    engine.cache.attach_store("memory:")
                except Exception as error:
                    refused.append(error)

        engine.cache.subscribe(hear)
        engine.cache.detach_store()
        assert len(gone) == len(set(gone)) == 10
        assert all(isinstance(error, StorageError | ConfigError) for error in refused)
        assert refused
        with pytest.raises(ConfigError, match="timeout_s"):
            engine.cache.detach_store(timeout_s=-1)


def test_a_read_only_store_is_read_and_not_written(tmp_path: Path) -> None:
    with engine_of(f"file:{tmp_path}?capacity=1MiB") as writer:
        writer.run(PROMPT)
    with engine_of() as engine:
        engine.cache.attach_store(f"file:{tmp_path}?read_only=true")
        assert engine.run(PROMPT)["storage"] == 40
        engine.run([6] * 9)
        assert persisted(engine) == 0


def test_the_books_see_a_hint_that_outlives_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without forgetting, pages of the old store are hits that nobody can bring."""
    monkeypatch.setattr("kvhoist.control.directory_core.DirectoryCore.drop_hints", lambda *_: 0)
    with engine_of(MemoryStore("8MiB")) as engine:
        engine.run(PROMPT)
        empty(engine)
        engine.cache.detach_store()
        assert engine.cache.match(PROMPT).num_pages == 10


@pytest.mark.parametrize("policy", ["write_through", "write_back", "write_through_selective"])
def test_threads_read_right_bytes_while_stores_come_and_go(policy: str, tmp_path: Path) -> None:
    stores = [f"file:{tmp_path}?capacity=1MiB", MemoryStore("64KiB"), MemoryStore("8MiB"), "memory:"]
    config = CacheConfig(write_policy=policy, min_hits=1, debug_verify=True)
    with TinyEngine(device_pages=40, host_pages=16, config=config) as engine:
        problems: list[BaseException] = []
        talking = threading.Event()
        talking.set()
        hits: dict[str, int] = {"storage": 0}

        def converse(seed: int) -> None:
            draw = np.random.default_rng(seed)
            try:
                while talking.is_set():
                    topic, length = int(draw.integers(6)) * 1000, int(draw.integers(1, 30))
                    hits["storage"] += engine.run([*range(topic, topic + length), 1])["storage"]
                    if draw.random() < 0.2:
                        engine.cache.evict("host", 8)
                        engine.cache.evict("device", 8)
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=converse, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        draw = np.random.default_rng(9)
        try:
            for turn in range(12):
                engine.cache.attach_store(stores[turn % len(stores)])
                asked = engine.cache.stats().jobs["lookup"]["jobs"]
                until(lambda asked=asked: problems or engine.cache.stats().jobs["lookup"]["jobs"] > asked + 3)
                if turn == 11:  # until then the stores may have come and gone too soon for that
                    until(lambda: problems or hits["storage"], "a hit in storage")
                report = engine.cache.detach_store(drain=bool(draw.random() < 0.5), timeout_s=30)
                assert not report.memory_kept
                engine.cache.audit()
        finally:
            talking.clear()
            for thread in threads:
                thread.join(60)
        assert not problems, problems[0]
        assert engine.cache.flush(30)
        stats = engine.cache.stats()
        assert (stats.num_mismatches, stats.open_jobs, stats.directory.tiers["storage"].ready_pages) == (0, 0, 0)
        assert hits["storage"] > 0, "nothing came from storage: this proves nothing"
