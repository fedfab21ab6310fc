"""A store that fails, hangs or is slow is fenced off, costs nobody time, and is tried again by itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhoist.errors import StorageError
from kvhoist.messages import StorageKey
from kvhoist.storage import Buffer, MemoryStore, Sealer, StorageIO
from kvhoist.storage.breaker import FENCED, Breaker
from kvhoist.storage.queue import ChunkQueue

DEADLINE_S = 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Moody(MemoryStore):
    """A store whose reads raise `fault`, or wait for `gate`."""

    def __init__(self) -> None:
        super().__init__("64MiB")
        self.fault: BaseException | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.num_calls = 0
        self.inside = threading.Semaphore(0)

    def get(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[bytes | None]:
        self.num_calls += 1
        self.inside.release()
        assert self.gate.wait(DEADLINE_S)
        if self.fault is not None:
            raise self.fault
        return super().get(keys, blobs)


@pytest.fixture
def moody(pages: Any) -> Iterator[Moody]:
    store = Moody()
    assert pages.put(store, range(8)) == [True] * 8
    yield store
    store.gate.set()


def reader(io: StorageIO, pages: Any) -> Callable[..., Any]:
    def read(*ids: int) -> Any:
        return io.prefetch(pages.keys(ids), [memoryview(bytearray(pages.page_bytes)) for _ in ids])

    return read


def test_a_store_that_fails_is_not_asked_for_a_while_and_then_once(
    moody: Moody, pages: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    io = StorageIO(moody, Sealer(), num_threads=1, clock=clock)
    read = reader(io, pages)
    moody.fault = StorageError("gone")
    with caplog.at_level(logging.INFO, "kvhoist.storage.breaker"):
        for _ in range(3):
            assert "gone" in read(1).result(DEADLINE_S).error
        for pause_s in (1, 2, 4, 8, 15, 15, 15, 15):
            asked = moody.num_calls
            clock.now += 0.99 * pause_s
            refused = read(1, 2)
            assert refused.done(), "a fenced store costs no wait"
            assert FENCED in refused.result().error
            assert "gone" in refused.result().error
            assert moody.num_calls == asked
            clock.now += 0.02 * pause_s
            assert "io error" in read(1).result(DEADLINE_S).error
            assert moody.num_calls == asked + 1
        stats = io.stats()
        assert (stats.fenced, stats.num_fences, stats.fenced_pages) == (True, 1, 16)
        moody.fault = None
        clock.now += 61
        assert read(1).result(DEADLINE_S).error is None
        assert read(1).result(DEADLINE_S).error is None
    assert not io.stats().fenced
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "store memory is fenced off (prefetch)",
        "store memory answers again (prefetch)",
    ]
    assert io.close()


def test_one_fault_among_good_calls_fences_nothing(moody: Moody, pages: Any) -> None:
    io = StorageIO(moody, Sealer(), num_threads=1)
    read = reader(io, pages)
    for _ in range(5):
        for fault in (StorageError("once"), StorageError("twice"), None):
            moody.fault = fault
            assert (read(1).result(DEADLINE_S).error is None) == (fault is None)
    assert io.stats().num_fences == 0
    assert io.close()


def test_a_store_that_answers_look_ups_but_no_read_is_fenced_for_reads_alone(moody: Moody, pages: Any) -> None:
    io = StorageIO(moody, Sealer(), num_threads=1)
    moody.fault = StorageError("half dead")
    for _ in range(20):
        assert io.lookup(pages.keys([1])).result(DEADLINE_S).error is None
        assert "half dead" in reader(io, pages)(1).result(DEADLINE_S).error
    assert moody.num_calls == 3
    assert io.persist(pages.keys([9]), [pages.blob(9)]).result(DEADLINE_S).error is None
    assert (io.stats().fenced, io.stats().num_fences) == (True, 1)
    assert io.close()


def test_missing_and_corrupt_pages_are_no_fault_of_the_store(moody: Moody, pages: Any) -> None:
    io = StorageIO(moody, Sealer(), num_threads=1)
    for _ in range(5):
        assert reader(io, pages)(77).result(DEADLINE_S).error == "1 x missing"
    assert io.stats().num_fences == 0
    assert io.close()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_store_that_hangs_gives_back_what_waits_for_it(moody: Moody, pages: Any, num_threads: int) -> None:
    io = StorageIO(moody, Sealer(), num_threads=num_threads, hang_s=0.2)
    read = reader(io, pages)
    moody.gate.clear()
    hanging = [read(i) for i in range(num_threads)]
    for _ in hanging:
        assert moody.inside.acquire(timeout=DEADLINE_S)
    waiting = [read(5), io.persist(pages.keys([6]), [pages.blob(6)]), io.lookup(pages.keys([7]))]
    assert not wait(waiting, DEADLINE_S).not_done, "what had not begun is answered though all threads hang"
    assert all(FENCED in str(future.result().error) for future in waiting)
    assert not any(future.done() for future in hanging), "their buffers are still in use"
    assert read(1).done()
    moody.gate.set()
    assert all(future.result(DEADLINE_S).error is None for future in hanging)
    deadline = time.monotonic() + DEADLINE_S
    while read(1).result(DEADLINE_S).error is not None:
        assert time.monotonic() < deadline, "it never comes back"
    assert io.stats().num_fences == 1
    assert io.close()


def test_a_call_that_was_too_slow_fences_the_store_also_where_it_succeeds() -> None:
    clock = Clock()
    breaker = Breaker("slow", hang_s=10, clock=clock)
    call = breaker.begin("read")
    assert isinstance(call, int)
    clock.now += 10.5
    breaker.end(call, None)
    assert "took 10.5 s" in str(breaker.refusal("read"))


def test_only_one_call_tries_a_fenced_store() -> None:
    clock = Clock()
    breaker = Breaker("store", hang_s=10, clock=clock)
    for _ in range(3):
        call = breaker.begin("read")
        assert isinstance(call, int)
        breaker.end(call, "gone")
    clock.now += 1
    assert breaker.refusal("read") is None
    trial = breaker.begin("read")
    assert isinstance(trial, int)
    assert FENCED in str(breaker.begin("read"))
    breaker.end(trial, None)
    assert breaker.refusal("read") is None


@given(st.lists(st.sampled_from(["begin", "good", "bad", "later"]), max_size=60))
def test_whatever_happens_a_store_that_is_well_again_is_used_again(steps: list[str]) -> None:
    clock = Clock()
    breaker = Breaker("store", hang_s=10, clock=clock)
    running: list[int] = []
    for step in steps:
        if step == "begin":
            call = breaker.begin("read")
            running += [call] if isinstance(call, int) else []
        elif step == "later":
            clock.now += 7
        elif running:
            breaker.end(running.pop(0), None if step == "good" else "gone")
    for call in running:
        breaker.end(call, "gone")
    clock.now += 61
    last = breaker.begin("read")
    assert isinstance(last, int)
    breaker.end(last, None)
    assert breaker.refusal("read") is None


def test_what_is_queued_as_the_last_thread_hangs_is_given_back(
    moody: Moody, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch may pass the breaker just before the fence and reach the queue just after what waited was given back."""
    io = StorageIO(moody, Sealer(), num_threads=1, hang_s=0.1)
    read = reader(io, pages)
    given_back = threading.Event()
    real_put, real_take = ChunkQueue.put, ChunkQueue.take_waiting

    def take_waiting(queue: ChunkQueue, *args: Any) -> Any:
        taken = real_take(queue, *args)
        given_back.set()
        return taken

    def put(queue: ChunkQueue, chunks: Any) -> int:
        assert given_back.wait(DEADLINE_S)
        return real_put(queue, chunks)

    moody.gate.clear()
    hanging = read(0)
    assert moody.inside.acquire(timeout=DEADLINE_S)
    monkeypatch.setattr(ChunkQueue, "take_waiting", take_waiting)
    monkeypatch.setattr(ChunkQueue, "put", put)
    late = read(1, 2)
    assert FENCED in str(late.result(DEADLINE_S).error)
    assert not hanging.done()
    moody.gate.set()
    assert hanging.result(DEADLINE_S).error is None
    assert io.close()


def test_a_trial_that_succeeds_ends_no_fence_while_another_call_hangs() -> None:
    clock = Clock()
    breaker = Breaker("store", hang_s=10, clock=clock)
    hangs = breaker.begin("read")
    assert isinstance(hangs, int)
    for _ in range(3):
        call = breaker.begin("read")
        assert isinstance(call, int)
        breaker.end(call, "gone")
    clock.now += 9
    trial = breaker.begin("read")
    assert isinstance(trial, int)
    clock.now += 2
    assert "has not returned" in str(breaker.wait_for_hang())
    breaker.end(trial, None)
    assert "has not returned" in str(breaker.refusal("read"))
    breaker.end(hangs, None)
    clock.now += 61
    again = breaker.begin("read")
    assert isinstance(again, int)
    breaker.end(again, None)
    assert breaker.refusal("read") is None


def test_a_cancelled_page_is_not_counted_as_one_that_the_fence_refused(moody: Moody, pages: Any) -> None:
    io = StorageIO(moody, Sealer(), num_threads=1, hang_s=0.2)
    read = reader(io, pages)
    moody.gate.clear()
    hanging = read(0)
    assert moody.inside.acquire(timeout=DEADLINE_S)
    dropped, kept = read(1, 2), read(3)
    assert dropped.cancel()  # by its own future: the queue learns of it later
    assert FENCED in str(kept.result(DEADLINE_S).error)
    moody.gate.set()
    assert hanging.result(DEADLINE_S).error is None
    assert io.close()
    stats = io.stats()
    assert (stats.fenced_pages, stats.cancelled_pages, stats.prefetched_pages) == (1, 2, 1)


def test_a_callback_that_exits_keeps_nobody_from_being_told_of_a_hang(moody: Moody, pages: Any) -> None:
    def leave(_: object) -> None:
        raise SystemExit

    io = StorageIO(moody, Sealer(), num_threads=1, hang_s=0.2)
    read = reader(io, pages)
    moody.gate.clear()
    hanging = read(0)
    assert moody.inside.acquire(timeout=DEADLINE_S)
    waiting = [read(1), read(2)]
    waiting[0].add_done_callback(leave)
    assert all(FENCED in str(future.result(DEADLINE_S).error) for future in waiting)
    moody.gate.set()
    assert hanging.result(DEADLINE_S).error is None
    assert io.close()


def test_a_kind_of_call_that_works_again_has_the_others_tried_at_once() -> None:
    breaker = Breaker("moody", hang_s=10.0, clock=(clock := Clock()))
    for kind in ("read", "write") * 3:
        breaker.end(int(breaker.begin(kind)), "gone")
    clock.now += 1.5
    breaker.end(int(breaker.begin("read")), "gone")
    assert breaker.refusal("read") == f"{FENCED}: gone", "reads wait 2 s now"
    breaker.end(int(breaker.begin("write")), None)
    assert breaker.refusal("read") is None
