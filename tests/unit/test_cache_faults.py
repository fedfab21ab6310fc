"""What must not happen to a cache when callers, callbacks, stores or processes misbehave: found by attacking it."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from forks import status_in_fork
from support import PAGE_TOKENS, TinyEngine, namespace

from kvhoist import acquire
from kvhoist.config import CacheConfig
from kvhoist.control.eviction.lru import LruPolicy
from kvhoist.control.keys import TokenChain
from kvhoist.control.tiers import Tier
from kvhoist.copies import Copied
from kvhoist.copy.reference import BoundPlan
from kvhoist.errors import ClosedError, ConfigError, PolicyError, TransferError
from kvhoist.messages import WHOLE, PageKey, StorageKey
from kvhoist.mover import Mover
from kvhoist.platform.cpu import CpuEvent
from kvhoist.storage.io import StorageIO
from kvhoist.storage.memory import MemoryStore
from kvhoist.storage.record import Sealer

LONG = list(range(100, 100 + 10 * PAGE_TOKENS))
OTHER = list(range(500, 500 + 10 * PAGE_TOKENS))
PROMPT = [*LONG, 7]


def foreign() -> TinyEngine:
    return TinyEngine(device_pages=24, host_pages=24, config=CacheConfig(device_owned=False))


def hold_copies(monkeypatch: pytest.MonkeyPatch, destination: str) -> threading.Event:
    """Make copies to `destination` wait for the event that is returned."""
    gate, real = threading.Event(), BoundPlan.copy

    def copy(plan: BoundPlan, src: Any, dst: Any) -> int:
        if plan.plan.dst.name == destination:
            assert gate.wait(30)
        return real(plan, src, dst)

    monkeypatch.setattr(BoundPlan, "copy", copy)
    return gate


# -- callbacks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_callback_that_raises_does_not_stop_the_mover(error):
    with foreign() as engine:
        produced = CpuEvent()
        first = engine.cache.write(engine.cache.match(LONG), list(range(10)), after=produced)
        assert first is not None

        def callback(_: object) -> None:
            raise error("planted")

        first.add_done_callback(callback)
        produced.set()
        first.result(30)
        second = engine.cache.write(engine.cache.match(OTHER), list(range(10)))
        assert second is not None
        second.wait(timeout_s=10)
        assert engine.cache.flush(10)


def test_a_callback_may_close_the_cache():
    engine = foreign()
    produced = CpuEvent()
    transfer = engine.cache.write(engine.cache.match(LONG), list(range(10)), after=produced)
    assert transfer is not None
    reports = []
    transfer.add_done_callback(lambda _: reports.append(engine.cache.close(timeout_s=10)))
    produced.set()
    transfer.result(30)
    deadline = time.monotonic() + 9
    while not reports and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [report.unfinished_jobs for report in reports] == [0]


def test_a_subscriber_that_calls_the_cache_is_refused_and_counted():
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        outcomes = []

        def meddle(_: object) -> None:
            for act in (lambda: engine.cache.evict("host", 9), lambda: engine.cache.flush(9), engine.cache.close):
                try:
                    act()
                except ConfigError as error:
                    outcomes.append(str(error))
            raise SystemExit

        engine.cache.subscribe(meddle)
        engine.run(PROMPT)
        assert engine.cache.flush(10)
        assert outcomes
        assert all("a subscriber called the cache" in outcome for outcome in outcomes)
        assert engine.cache.stats().directory.subscriber_errors == len(outcomes) // 3


# -- wrong bytes ---------------------------------------------------------------------------------------------------


def test_a_layerwise_lease_holds_no_page_that_another_request_is_computing(monkeypatch):
    gate = hold_copies(monkeypatch, "device")
    with TinyEngine(device_pages=24, host_pages=16) as engine:
        engine.run(PROMPT)
        assert engine.cache.flush(10)
        engine.cache.evict("device", 24)
        engine.scribble()
        with engine.cache.reserve(PROMPT[: 4 * PAGE_TOKENS]) as computing:
            assert len(computing.device_pages) == 4
            with engine.cache.acquire(engine.cache.match(PROMPT), layerwise=True) as lease:
                gate.set()
                lease.wait(timeout_s=30)
                engine.check(PROMPT, lease)


@pytest.mark.parametrize("when", ["while its loads are under way", "before its pages are read off"])
def test_a_layerwise_lease_keeps_its_pages_when_the_cache_is_cleared(when, monkeypatch):
    gate = hold_copies(monkeypatch, "device")
    with TinyEngine(device_pages=12, host_pages=16) as engine:
        engine.run(PROMPT)
        assert engine.cache.flush(10)
        engine.cache.evict("device", 12)
        engine.scribble()
        run = acquire.run

        def run_and_clear(*arguments: Any, **options: Any) -> Any:
            loads = run(*arguments, **options)
            engine.cache.clear()
            return loads

        if when.startswith("before"):
            monkeypatch.setattr(acquire, "run", run_and_clear)
        with engine.cache.acquire(engine.cache.match(PROMPT), layerwise=True) as lease:
            assert lease.num_pages == 10
            engine.cache.clear()
            gate.set()
            lease.wait(timeout_s=30)
            engine.cache.audit()
            assert engine.cache.match(PROMPT).num_pages == 0
            with engine.cache.reserve(OTHER) as reservation:
                for index, page in zip(reservation.page_indices, reservation.device_pages, strict=True):
                    engine.compute(OTHER, index, page)
            engine.check(PROMPT, lease)
        assert engine.cache.flush(10)
        assert engine.cache.stats().directory.tiers["device"].free_pages == 12


def test_a_layerwise_lease_that_failed_keeps_the_leading_pages_that_arrived(monkeypatch):
    with TinyEngine(device_pages=24, host_pages=16) as engine:
        engine.run(PROMPT)
        assert engine.cache.flush(10)
        engine.cache.evict("device", 24)
        copies = engine.cache._binding.mover._copies
        assert copies is not None
        gate, load = threading.Event(), copies.load

        def two_pages_fail(job: Any, *rest: Any) -> Any:
            assert gate.wait(30)
            finish = load(job, *rest)
            return (lambda: Copied(0, (2, 3), "planted")) if job.num_pages == 7 else finish

        monkeypatch.setattr(copies, "load", two_pages_fail)
        with (
            engine.cache.acquire(engine.cache.match(PROMPT[: 3 * PAGE_TOKENS]), layerwise=True),
            engine.cache.acquire(engine.cache.match(PROMPT), layerwise=True) as lease,
        ):
            gate.set()
            assert lease.num_pages == 10
            with pytest.raises(TransferError, match="planted"):
                lease.check(timeout_s=30)
            lease.keep_arrived()
            assert lease.num_pages == 5  # three that another request loads, two of its own
            assert lease.tokens_by_tier == {"device": 0, "host": 5 * PAGE_TOKENS, "storage": 0}
            lease.check()
            engine.check(PROMPT, lease)
            with engine.cache.reserve(PROMPT, lease=lease) as reservation:
                assert reservation.page_indices == [5, 6]


def test_a_layerwise_lease_gives_up_pages_that_are_still_under_way(monkeypatch):
    gate = hold_copies(monkeypatch, "device")
    with TinyEngine(device_pages=24, host_pages=16) as engine:
        engine.run(PROMPT)
        assert engine.cache.flush(10)
        engine.cache.evict("device", 24)
        with engine.cache.acquire(engine.cache.match(PROMPT), layerwise=True) as lease:
            with pytest.raises(TimeoutError):
                lease.check(timeout_s=0.01)
            lease.keep_arrived()
            assert (lease.num_pages, lease.transfers) == (0, [])
            gate.set()
        assert engine.cache.flush(10)
        assert engine.cache.evict("device", 24) == 10, "no pin may be left"


def test_a_match_of_another_cache_is_refused():
    with TinyEngine(device_pages=16, host_pages=16) as one, TinyEngine(device_pages=16, host_pages=16) as other:
        one.run(PROMPT)
        other.run([*OTHER, 7])
        match = one.cache.match(PROMPT)
        for use in (other.cache.acquire, other.cache.pin, other.cache.prefetch, other.cache.persist):
            with pytest.raises(ConfigError, match="no match of this cache"):
                use(match)
        with one.cache.acquire(match) as lease, pytest.raises(ConfigError, match="no match of this cache"):
            other.cache.reserve(PROMPT, lease=lease)


def test_a_lease_of_other_tokens_or_of_another_namespace_is_no_prefix():
    with TinyEngine(device_pages=32, host_pages=16) as engine:
        engine.run(PROMPT)
        other = namespace(engine.geometry, weights_id="w2")
        with engine.cache.acquire(engine.cache.match(PROMPT)) as lease:
            for arguments in (
                {"tokens": OTHER},
                {"tokens": PROMPT, "salt": b"x"},
                {"tokens": LONG, "namespace": other},
            ):
                with pytest.raises(ConfigError, match="the lease is of other tokens"):
                    engine.cache.reserve(**arguments, lease=lease)


def test_a_chain_of_another_salt_or_page_is_refused():
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        engine.run(PROMPT)
        for chain, salt in ((TokenChain(PAGE_TOKENS), b"tenant"), (TokenChain(2 * PAGE_TOKENS), b"")):
            with pytest.raises(ConfigError, match="this chain is not one of these pages"):
                engine.cache.match(PROMPT, salt=salt, chain=chain)
        assert engine.cache.match(PROMPT, salt=b"x", chain=TokenChain(PAGE_TOKENS, b"x")).num_pages == 0


# -- races ---------------------------------------------------------------------------------------------------------


def test_pages_evicted_while_a_match_is_made_do_not_upset_it():
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        engine.run(PROMPT)
        assert engine.cache.flush(10)
        lock = engine.cache._lock

        class Meddler:
            """Evicts everything when the lock is given back for the second time: once the directory was asked."""

            num_exits = 0

            def __enter__(self) -> None:
                lock.acquire()

            def __exit__(self, *_: object) -> None:
                lock.release()
                self.num_exits += 1
                if self.num_exits == 2:
                    for tier in (Tier.DEVICE, Tier.HOST):
                        engine.cache._plane.directory.evict(tier, 16)

        engine.cache._lock = Meddler()  # type: ignore[assignment]
        try:
            assert engine.cache.match(PROMPT).num_pages == 10
        finally:
            engine.cache._lock = lock


def test_a_question_to_storage_stays_pending_until_it_is_answered_and_is_shared():
    class Slow(MemoryStore):
        gate = threading.Event()
        num_asked = 0

        def exists(self, keys: Any) -> list[bool]:
            self.num_asked += 1
            self.gate.wait(30)
            return super().exists(keys)

    store = Slow("8MiB")
    Slow.gate.set()
    with TinyEngine(device_pages=16, host_pages=16, store=store) as engine:
        engine.run(PROMPT)
    store.num_asked = 0
    Slow.gate.clear()
    with TinyEngine(device_pages=16, host_pages=16, store=store, config=CacheConfig(io_threads=1)) as engine:
        assert [engine.cache.match(PROMPT, timeout_s=0).pending for _ in range(3)] == [True] * 3
        threading.Timer(0.1, Slow.gate.set).start()
        match = engine.cache.match(PROMPT, timeout_s=10)
        assert (match.num_pages, match.pending, store.num_asked) == (10, False, 1)


def test_clearing_the_store_also_takes_what_was_on_its_way_there():
    class Slow(MemoryStore):
        started, gate = threading.Event(), threading.Event()

        def put(self, *arguments: Any) -> list[bool]:
            self.started.set()
            self.gate.wait(30)
            return super().put(*arguments)

    store = Slow("8MiB")
    with TinyEngine(device_pages=16, host_pages=16, store=store) as engine:
        engine.run(PROMPT)
        assert store.started.wait(10)
        threading.Timer(0.1, store.gate.set).start()
        engine.cache.clear(storage=True)
        assert engine.cache.flush(10)
        assert store.stats().num_pages == 0


# -- stores, policies and processes that fail ----------------------------------------------------------------------


class Deaf(MemoryStore):
    """Raises in whatever is not part of a job."""

    broken = True

    def note_namespace(self, *_: Any) -> None:
        self._fail()

    def namespaces(self) -> dict[bytes, dict[str, str]]:
        self._fail()
        return {}

    def stats(self) -> Any:
        self._fail()

    def close(self) -> None:
        self._fail()

    def _fail(self) -> None:
        raise OSError("planted")


def test_a_store_that_fails_outside_of_jobs_costs_nothing_but_is_counted():
    with TinyEngine(device_pages=16, host_pages=16, store=Deaf("8MiB")) as engine:
        engine.run(PROMPT)
        assert engine.cache.match(PROMPT, namespace=namespace(engine.geometry, weights_id="w2")).num_pages == 0
        assert "never seen" in str(engine.cache.explain([*OTHER, 7]))
        stats = engine.cache.stats()
        assert stats.store is None
        assert stats.num_store_errors == 4
        engine.cache._binding.slot.current.owned = True
    assert engine.cache._binding.arena.closed
    assert engine.cache._binding.slot.num_errors == 5


def test_fields_of_a_namespace_that_mean_nothing_do_not_stop_explain():
    store = MemoryStore("8MiB")
    store.note_namespace(b"x" * 32, {})
    with TinyEngine(device_pages=16, host_pages=16, store=store) as engine:
        assert "never seen" in str(engine.cache.explain(PROMPT))


@pytest.mark.parametrize("name", ["namespace", "KVHOIST_DISABLE"])
def test_what_is_wrong_with_a_cache_is_found_before_threads_start(name, monkeypatch):
    before = threading.active_count()
    if name == "namespace":
        monkeypatch.setattr("support.namespace", lambda _: "tiny")
    else:
        monkeypatch.setenv(name, "perhaps")
    with pytest.raises(ConfigError, match=name):
        TinyEngine(device_pages=4, host_pages=4)
    assert threading.active_count() == before


def test_a_job_that_the_storage_io_does_not_take_fails_and_is_forgotten(monkeypatch):
    with TinyEngine(device_pages=16, host_pages=16, store=MemoryStore("8MiB")) as engine:

        def refuse(*_: Any) -> None:
            raise MemoryError("planted")

        monkeypatch.setattr(engine.cache._binding.slot.current.io, "persist", refuse)
        engine.run(PROMPT)
        assert engine.cache.flush(10)
        assert engine.cache.stats().open_jobs == 0
        assert engine.cache.stats().jobs["persist"]["failed_pages"] == 10


def test_an_eviction_policy_that_fails_leaves_no_reservation_behind():
    class Failing(LruPolicy):
        calls_left = 1 << 30

        def choose(self, num_pages: int) -> Any:
            Failing.calls_left -= 1
            if Failing.calls_left < 0:
                raise RuntimeError("planted")
            return super().choose(num_pages)

    with TinyEngine(device_pages=32, host_pages=6, config=CacheConfig(eviction=Failing)) as engine:
        engine.run([*OTHER, 7][: 4 * PAGE_TOKENS])
        assert engine.cache.flush(10)
        with engine.cache.reserve(PROMPT) as reservation:
            entries_with_gap = [i for i in range(10) if i != 1]
            reservation.commit()
            assert engine.cache.flush(10)
        engine.cache.evict("host", 6)
        Failing.calls_left = 0
        space, keys = engine.cache.match(PROMPT).space, list(engine.cache.match(PROMPT).keys)
        real = engine.cache._plane._may_offload
        engine.cache._plane._may_offload = (  # type: ignore[method-assign]
            lambda space, key: keys.index(key) in entries_with_gap and real(space, key)
        )
        with pytest.raises(PolicyError, match="planted"):
            engine.cache._plane.offload(space, keys, 0, 10)
        assert engine.cache.stats().directory.tiers["host"].filling_pages == 0
        engine.cache.audit()


def test_a_forked_child_is_told_instead_of_waiting_for_threads_that_are_not_there():
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        engine.run(PROMPT)
        assert engine.cache.flush(10)

        def be_told() -> int:
            try:
                engine.cache.match(PROMPT)
            except ClosedError:
                engine.cache.close()
                return 0
            return 1

        assert status_in_fork(be_told) == 0


# -- write_back ----------------------------------------------------------------------------------------------------


def test_flush_of_write_back_keeps_to_its_time(monkeypatch):
    gate = hold_copies(monkeypatch, "page_first_direct")
    with TinyEngine(device_pages=16, host_pages=16, config=CacheConfig(write_policy="write_back")) as engine:
        engine.run(PROMPT)
        started = time.monotonic()
        assert not engine.cache.flush(0.1)
        assert time.monotonic() - started < 5
        gate.set()


def test_write_back_reaches_the_store_through_a_host_tier_smaller_than_the_device():
    store = MemoryStore("8MiB")
    config = CacheConfig(write_policy="write_back")
    prompts = [list(range(first, first + 4 * PAGE_TOKENS + 1)) for first in (0, 100, 200)]
    with TinyEngine(device_pages=16, host_pages=4, store=store, config=config) as engine:
        for prompt in prompts:
            engine.run(prompt)
    with TinyEngine(device_pages=16, host_pages=4, store=store, config=config) as engine:
        assert [engine.run(prompt)["storage"] for prompt in prompts] == [4 * PAGE_TOKENS] * 3


# -- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, float("nan"), "1", True])
def test_a_time_that_is_none_is_refused(value):
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        cache = engine.cache
        for use in (
            lambda: cache.match(PROMPT, timeout_s=value),
            lambda: cache.acquire(cache.match(PROMPT), timeout_s=value),
            lambda: cache.flush(value),
            lambda: cache.close(timeout_s=value),
            lambda: CacheConfig(lookup_timeout_s=value),
        ):
            with pytest.raises(ConfigError, match=r"timeout_s is out of range.*expected seconds"):
                use()
        engine.run(PROMPT)


def test_for_ever_is_a_time():
    store = MemoryStore("8MiB")
    with TinyEngine(device_pages=16, host_pages=16, store=store) as engine:
        ever = float("inf")
        cache = engine.cache
        cache.acquire(cache.match(PROMPT, timeout_s=ever), timeout_s=ever).release()
        assert cache.flush(ever)
        cache.close(timeout_s=ever)


@pytest.mark.parametrize("value", [-1, 1.5, "3", None, True])
@pytest.mark.parametrize("tier", ["host", "device"])
def test_a_number_of_pages_that_is_none_is_refused_and_upsets_no_policy(tier, value):
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        engine.run(PROMPT)
        assert engine.cache.flush(10)
        with pytest.raises(ConfigError, match="num_pages is out of range"):
            engine.cache.evict(tier, value)
        assert engine.cache.evict(tier, 1 << 70) == 10


@pytest.mark.parametrize("blocks", [[1.5], ["a"], [None], None, np.array([1.0])])
@pytest.mark.parametrize("use", ["write", "offload", "load"])
def test_blocks_that_are_no_ids_are_refused(use, blocks):
    with foreign() as engine, pytest.raises(ConfigError, match="these device blocks cannot hold pages"):
        getattr(engine.cache, use)(engine.cache.match(LONG), blocks)


@pytest.mark.parametrize("first", [-1, 11, 1.0])
def test_a_first_page_outside_of_the_match_is_refused(first):
    with TinyEngine(device_pages=16, host_pages=16) as engine, pytest.raises(ConfigError, match="first is out of"):
        engine.cache.offload(engine.cache.match(LONG), first=first)


@pytest.mark.parametrize(
    "options",
    [
        {"io_threads": 0},
        {"max_queued_pages": 1.5},
        {"block_quota": 0},
        {"block_quota": True},
        {"history_pages": "1"},
        {"device_owned": "no"},
        {"store_secret": "text"},
        {"acquire_timeout_s": 1e9},
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_at_construction(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        CacheConfig(**options)


def test_a_store_that_is_slow_to_note_a_namespace_holds_nobody_up() -> None:
    gate = threading.Event()

    class SlowNotes(MemoryStore):
        def note_namespace(self, *args: Any) -> None:
            assert gate.wait(30)
            super().note_namespace(*args)

    store = SlowNotes("8MiB")
    with TinyEngine(device_pages=16, host_pages=16, store=store) as engine:
        assert engine.cache.match([1] * 8, timeout_s=0).num_pages == 0
        assert not store.namespaces()
        gate.set()
        assert engine.cache.flush(30)
        assert list(store.namespaces()) == [engine.cache.namespace.digest]


def test_a_callback_of_storage_may_close_the_io() -> None:
    class GatedLookups(MemoryStore):
        gate = threading.Event()

        def exists(self, keys: Any) -> list[bool]:
            assert self.gate.wait(30)
            return super().exists(keys)

    io = StorageIO(GatedLookups("1MiB"), Sealer(None), num_threads=2)
    closed: list[bool] = []
    done = threading.Event()
    future = io.lookup([StorageKey(PageKey(b"n" * 32, 0, b"k" * 32), WHOLE)])
    future.add_done_callback(lambda _: (closed.append(io.close(timeout_s=10)), done.set()))
    GatedLookups.gate.set()
    assert done.wait(30)
    assert closed == [True]


def test_closing_a_cache_whose_store_hangs_spends_its_time_once(monkeypatch) -> None:
    class Hangs(MemoryStore):
        gate, inside = threading.Event(), threading.Event()

        def put(self, *args: Any) -> list[bool]:
            self.inside.set()
            assert self.gate.wait(30)
            return super().put(*args)

    limits: list[float] = []
    for part in (Mover, StorageIO):

        def close(self, *, drain, timeout_s, real=part.close):
            limits.append(timeout_s)
            return real(self, drain=drain, timeout_s=timeout_s)

        monkeypatch.setattr(part, "close", close)
    store = Hangs("1MiB")
    engine = TinyEngine(device_pages=24, host_pages=24, store=store, config=CacheConfig(device_owned=False))
    engine.cache.write(engine.cache.match(LONG), list(range(10)))
    assert store.inside.wait(30)
    report = engine.cache.close(drain=False, timeout_s=1.5)
    assert (report.unfinished_jobs, report.memory_kept) == (1, True)
    assert limits[1] < limits[0], "the storage I/O gets what the mover has left"
    store.gate.set()
    engine.cache.audit()


def test_closing_a_cache_does_not_wait_for_its_store_to_finish_calls_that_hang(monkeypatch) -> None:
    class Hangs(MemoryStore):
        gate, inside, closed = threading.Event(), threading.Event(), threading.Event()

        def put(self, *args: Any) -> list[bool]:
            self.inside.set()
            assert self.gate.wait(30)
            return super().put(*args)

        def close(self) -> None:
            assert self.gate.wait(10)
            super().close()
            self.closed.set()

    store = Hangs("1MiB")
    monkeypatch.setattr("kvhoist.attached_store.open_store", lambda _: store)
    engine = TinyEngine(device_pages=24, host_pages=24, store="memory:", config=CacheConfig(device_owned=False))
    engine.cache.write(engine.cache.match(LONG), list(range(10)))
    assert store.inside.wait(30)
    assert engine.cache.close(drain=False, timeout_s=1).memory_kept
    assert engine.cache._binding.slot.num_errors == 0, "it was waited for until it gave up"
    store.gate.set()
    assert store.closed.wait(30)
