from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, wait
from typing import Any

import pytest

from kvhoist.errors import ClosedError, ConfigError, StorageError
from kvhoist.messages import StorageKey
from kvhoist.storage import Buffer, MemoryStore, PageOutcomes, Sealer, StorageIO
from kvhoist.storage.outcomes import CANCELLED, MISSING, QUEUE_FULL

DEADLINE_S = 20


class GatedStore(MemoryStore):
    """A store whose puts wait for a gate, and that may be told to raise."""

    def __init__(self) -> None:
        super().__init__("64MiB")
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.fault: BaseException | None = None

    def put(self, keys: Sequence[StorageKey], headers: Sequence[bytes], blobs: Sequence[Buffer]) -> list[bool]:
        self.entered.release()
        assert self.gate.wait(DEADLINE_S)
        if self.fault is not None:
            raise self.fault
        return super().put(keys, headers, blobs)


@pytest.fixture
def gated() -> Iterator[GatedStore]:
    store = GatedStore()
    yield store
    store.gate.set()


@pytest.fixture
def make_io() -> Iterator[Callable[..., StorageIO]]:
    made: list[StorageIO] = []

    def make(store: Any, **options: Any) -> StorageIO:
        made.append(StorageIO(store, Sealer(), **options))
        return made[-1]

    yield make
    for io in made:
        assert io.close(drain=False, timeout_s=DEADLINE_S)


def blobs_of(pages: Any, ids: Sequence[int]) -> list[memoryview]:
    return [pages.blob(i) for i in ids]


def buffers_of(pages: Any, ids: Sequence[int]) -> list[memoryview]:
    return [memoryview(bytearray(pages.page_bytes)) for _ in ids]


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("chunk_bytes", [1, 20_000, 1 << 30])
def test_batches_round_trip_in_any_cut(make_io: Any, pages: Any, num_threads: int, chunk_bytes: int) -> None:
    io = make_io(MemoryStore(), num_threads=num_threads, chunk_bytes=chunk_bytes)
    stored = io.persist(pages.keys(range(17)), blobs_of(pages, range(17))).result(DEADLINE_S)
    assert stored.reasons == (None,) * 17
    assert stored.bytes == 17 * pages.page_bytes
    ids = [16, 99, 3, 0, 98]
    buffers = buffers_of(pages, ids)
    read = io.prefetch(pages.keys(ids), buffers).result(DEADLINE_S)
    assert read.reasons == (None, MISSING, None, None, MISSING)
    assert read.failed_pages == (1, 4)
    assert read.error == "2 x missing"
    assert read.bytes == 3 * pages.page_bytes
    assert [buffers[i] == pages.blob(ids[i]) for i in (0, 2, 3)] == [True] * 3


class NotingStore(MemoryStore):
    """Notes how many pages each call moves."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[int] = []
        self.gets: list[int] = []

    def put(self, keys: Sequence[StorageKey], headers: Sequence[bytes], blobs: Sequence[Buffer]) -> list[bool]:
        self.puts.append(len(keys))
        return super().put(keys, headers, blobs)

    def get(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[bytes | None]:
        self.gets.append(len(keys))
        return super().get(keys, blobs)


@pytest.mark.parametrize(
    ("num_threads", "num_pages", "pages_a_chunk", "puts", "gets"),
    [
        (8, 64, 100, [9] * 6 + [10], [8] * 8),
        (8, 64, 8, [4] * 6 + [5] * 8, [8] * 8),
        (8, 64, 0, [1] * 64, [1] * 64),
        (8, 5, 100, [1] * 5, [1] * 5),
        (1, 10, 4, [3, 3, 4], [3, 3, 4]),
        (2, 7, 100, [7], [3, 4]),
    ],
)
def test_a_batch_is_cut_evenly_for_the_threads_that_may_take_it(
    make_io: Any, pages: Any, num_threads: int, num_pages: int, pages_a_chunk: int, puts: list[int], gets: list[int]
) -> None:
    """One thread of several never persists."""
    store = NotingStore()
    io = make_io(store, num_threads=num_threads, chunk_bytes=max(1, pages_a_chunk * pages.page_bytes))
    ids = range(num_pages)
    io.persist(pages.keys(ids), blobs_of(pages, ids)).result(DEADLINE_S)
    io.prefetch(pages.keys(ids), buffers_of(pages, ids)).result(DEADLINE_S)
    assert (sorted(store.puts), sorted(store.gets)) == (puts, gets)


def test_lookup_and_drop(make_io: Any, pages: Any) -> None:
    io = make_io(MemoryStore())
    io.persist(pages.keys(range(4)), blobs_of(pages, range(4))).result(DEADLINE_S)
    assert io.drop(pages.keys([0, 9])).result(DEADLINE_S).error is None
    assert io.lookup(pages.keys(range(5))).result(DEADLINE_S).failed_pages == (0, 4)
    stats = io.stats()
    assert (stats.persisted_pages, stats.removed_pages, stats.found_pages) == (4, 1, 3)
    assert (stats.queued_pages, stats.running_pages) == (0, 0)


def test_an_empty_batch_is_done_at_once(make_io: Any) -> None:
    io = make_io(MemoryStore())
    assert io.persist([], []).result(0) == PageOutcomes(())


def test_a_corrupt_page_is_a_miss_with_its_reason_and_is_quarantined(make_io: Any, pages: Any) -> None:
    store = MemoryStore()
    io = make_io(store)
    damaged = memoryview(bytes(pages.page_bytes))
    store.put([pages.key(1)], [pages.sealer.seal(pages.key(1), pages.blob(1))], [damaged])
    pages.put(store, [2])
    outcomes = io.prefetch(pages.keys([1, 2]), buffers_of(pages, [1, 2])).result(DEADLINE_S)
    assert outcomes.failed_pages == (0,)
    assert outcomes.reasons[0] is not None
    assert outcomes.reasons[0].startswith("corrupt: blob damaged")
    assert store.exists(pages.keys([1, 2])) == [False, True]
    assert store.stats().quarantined_pages == io.stats().corrupt_pages == 1


def test_with_the_check_taken_out_the_damage_goes_through(pages: Any) -> None:
    class Blind(Sealer):
        def check(self, key: StorageKey, header: bytes, blob: Buffer) -> str | None:
            return None

    store = MemoryStore()
    damaged = memoryview(bytes(pages.page_bytes))
    store.put([pages.key(1)], [pages.sealer.seal(pages.key(1), pages.blob(1))], [damaged])
    io = StorageIO(store, Blind())
    buffers = buffers_of(pages, [1])
    assert io.prefetch(pages.keys([1]), buffers).result(DEADLINE_S).error is None
    assert buffers[0] == damaged != pages.blob(1)
    assert io.close()


@pytest.mark.parametrize("fault", [StorageError("gone"), OSError(5, "I/O error"), SystemExit(1), KeyboardInterrupt()])
def test_whatever_a_store_raises_fails_those_pages_and_no_thread(
    make_io: Any, gated: GatedStore, pages: Any, fault: BaseException
) -> None:
    now = [0.0]
    io = make_io(gated, num_threads=1, clock=lambda: now[0])
    gated.fault = fault
    gated.gate.set()
    for _ in range(3):
        outcomes = io.persist(pages.keys([1, 2]), blobs_of(pages, [1, 2])).result(DEADLINE_S)
        assert outcomes.failed_pages == (0, 1)
        assert f"io error: {type(fault).__name__}" in str(outcomes.error)
    gated.fault = None
    now[0] += 1
    assert io.persist(pages.keys([1, 2]), blobs_of(pages, [1, 2])).result(DEADLINE_S).error is None
    assert io.stats().error_pages == 6


@pytest.mark.parametrize("method", ["put", "get", "exists"])
@pytest.mark.parametrize("answers", [0, 1, 3])
def test_a_store_that_does_not_answer_for_each_page_fails_them_and_hangs_nobody(
    make_io: Any, pages: Any, monkeypatch: pytest.MonkeyPatch, method: str, answers: int
) -> None:
    store = MemoryStore()
    monkeypatch.setattr(store, method, lambda *_: [None if method == "get" else True] * answers)
    io = make_io(store, num_threads=1)
    futures = {
        "put": lambda: io.persist(pages.keys([1, 2]), blobs_of(pages, [1, 2])),
        "get": lambda: io.prefetch(pages.keys([1, 2]), buffers_of(pages, [1, 2])),
        "exists": lambda: io.lookup(pages.keys([1, 2])),
    }
    assert futures[method]().result(DEADLINE_S).failed_pages == (0, 1)


def test_a_callback_that_raises_kills_no_thread(make_io: Any, pages: Any) -> None:
    def raise_exit(_: object) -> None:
        raise SystemExit

    store = GatedStore()
    io = make_io(store, num_threads=1)
    future = io.persist(pages.keys([1]), blobs_of(pages, [1]))
    future.add_done_callback(raise_exit)
    store.gate.set()
    assert future.result(DEADLINE_S).error is None
    assert io.lookup(pages.keys([1])).result(DEADLINE_S).error is None


def test_persists_beyond_the_bound_are_refused(make_io: Any, gated: GatedStore, pages: Any) -> None:
    io = make_io(gated, num_threads=1, max_queued_pages=10, chunk_bytes=1)
    running = io.persist(pages.keys([0]), blobs_of(pages, [0]))
    assert gated.entered.acquire(timeout=DEADLINE_S)
    queued = io.persist(pages.keys(range(1, 9)), blobs_of(pages, range(1, 9)))
    partly = io.persist(pages.keys(range(9, 12)), blobs_of(pages, range(9, 12)))
    refused = io.persist(pages.keys([12]), blobs_of(pages, [12]))
    assert refused.result(0).reasons == (QUEUE_FULL,)
    gated.gate.set()
    assert partly.result(DEADLINE_S).reasons == (None, None, QUEUE_FULL)
    assert [future.result(DEADLINE_S).error for future in (running, queued)] == [None] * 2
    assert gated.exists(pages.keys(range(13))) == [True] * 11 + [False] * 2
    assert io.stats().refused_pages == 2


def test_reads_are_not_starved_by_persists(make_io: Any, gated: GatedStore, pages: Any) -> None:
    io = make_io(gated, num_threads=2, chunk_bytes=1)
    MemoryStore.put(gated, pages.keys([99]), [pages.sealer.seal(pages.key(99), pages.blob(99))], [pages.blob(99)])
    persist = io.persist(pages.keys(range(50)), blobs_of(pages, range(50)))
    assert gated.entered.acquire(timeout=DEADLINE_S)
    assert io.prefetch(pages.keys([99]), buffers_of(pages, [99])).result(DEADLINE_S).error is None
    assert io.lookup(pages.keys([98])).result(DEADLINE_S).error == "1 x missing"
    assert not persist.done()
    gated.gate.set()
    assert persist.result(DEADLINE_S).error is None


def test_what_has_not_begun_can_be_cancelled(make_io: Any, gated: GatedStore, pages: Any) -> None:
    io = make_io(gated, num_threads=1, chunk_bytes=1)
    begun = io.persist(pages.keys(range(5)), blobs_of(pages, range(5)))
    assert gated.entered.acquire(timeout=DEADLINE_S)
    waiting = io.persist(pages.keys(range(5, 9)), blobs_of(pages, range(5, 9)))
    assert io.cancel(waiting)
    with pytest.raises(CancelledError):
        waiting.result(0)
    assert not wait([waiting], timeout=DEADLINE_S).not_done
    assert io.cancel(begun)
    gated.gate.set()
    outcomes = begun.result(DEADLINE_S)
    assert outcomes.reasons[0] is None
    assert set(outcomes.reasons[1:]) == {CANCELLED}
    assert not io.cancel(begun)
    assert gated.exists(pages.keys(range(9))) == [True] + [False] * 8
    assert io.stats().cancelled_pages == 8
    assert io.stats().queued_pages == 0


def test_a_future_that_was_cancelled_directly_is_skipped(make_io: Any, gated: GatedStore, pages: Any) -> None:
    io = make_io(gated, num_threads=1, chunk_bytes=1)
    begun = io.persist(pages.keys([0]), blobs_of(pages, [0]))
    assert gated.entered.acquire(timeout=DEADLINE_S)
    waiting = io.persist(pages.keys([1, 2]), blobs_of(pages, [1, 2]))
    assert waiting.cancel()
    gated.gate.set()
    assert begun.result(DEADLINE_S).error is None
    assert not wait([waiting], timeout=DEADLINE_S).not_done
    assert io.lookup(pages.keys([1, 2])).result(DEADLINE_S).failed_pages == (0, 1)


def test_close_drains(pages: Any) -> None:
    store = MemoryStore()
    io = StorageIO(store, Sealer(), num_threads=2, chunk_bytes=1)
    futures = [io.persist(pages.keys([i]), blobs_of(pages, [i])) for i in range(50)]
    assert io.close(drain=True, timeout_s=DEADLINE_S)
    assert all(future.result(0).error is None for future in futures)
    assert io.close()
    with pytest.raises(ClosedError, match="closed"):
        io.lookup(pages.keys([1]))


def test_close_without_drain_cancels_and_every_future_is_done(gated: GatedStore, pages: Any) -> None:
    io = StorageIO(gated, Sealer(), num_threads=2, chunk_bytes=1)
    futures = [io.persist(pages.keys([i, i + 100]), blobs_of(pages, [i, i + 100])) for i in range(20)]
    assert gated.entered.acquire(timeout=DEADLINE_S)
    closer = threading.Thread(target=io.close, kwargs={"drain": False})
    closer.start()
    assert not wait(futures[2:], timeout=DEADLINE_S).not_done
    gated.gate.set()
    closer.join(DEADLINE_S)
    assert not closer.is_alive()
    assert not wait(futures, timeout=DEADLINE_S).not_done
    stats = io.stats()
    assert stats.persisted_pages + stats.cancelled_pages == 40


def test_close_is_bounded_when_the_store_hangs(gated: GatedStore, pages: Any) -> None:
    io = StorageIO(gated, Sealer(), num_threads=1, chunk_bytes=1)
    hanging = io.persist(pages.keys([0]), blobs_of(pages, [0]))
    assert gated.entered.acquire(timeout=DEADLINE_S)
    waiting = io.persist(pages.keys([1]), blobs_of(pages, [1]))
    assert not io.close(drain=True, timeout_s=0.05)
    assert waiting.cancelled()
    assert not hanging.done()
    gated.gate.set()
    assert hanging.result(DEADLINE_S).error is None
    assert io.close()


def test_bad_arguments_are_refused(make_io: Any, pages: Any) -> None:
    for options in ({"num_threads": 0}, {"num_threads": True}, {"max_queued_pages": -1}, {"chunk_bytes": 0}):
        with pytest.raises(ConfigError):
            StorageIO(MemoryStore(), Sealer(), **options)
    io = make_io(MemoryStore())
    with pytest.raises(ConfigError, match="one buffer a key"):
        io.persist(pages.keys([1, 2]), blobs_of(pages, [1]))
    with pytest.raises(ConfigError, match="read-only"):
        io.prefetch(pages.keys([1]), [memoryview(bytes(10))])


def test_buffers_of_any_shape_are_taken_as_bytes(make_io: Any, pages: Any) -> None:
    np = pytest.importorskip("numpy")
    io = make_io(MemoryStore())
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert io.persist([pages.key(1)], [memoryview(array)]).result(DEADLINE_S).bytes == 48
    target = np.zeros_like(array)
    assert io.prefetch([pages.key(1)], [memoryview(target)]).result(DEADLINE_S).error is None
    assert (target == array).all()


def test_a_lookup_is_one_call_of_the_store_however_many_threads_there_are(pages: Any) -> None:
    asked: list[int] = []

    class Counting(MemoryStore):
        def exists(self, keys: Sequence[StorageKey]) -> list[bool]:
            asked.append(len(keys))
            return super().exists(keys)

    io = StorageIO(Counting(), Sealer(), num_threads=8)
    assert io.lookup(pages.keys(range(100))).result(DEADLINE_S).error == "100 x missing"
    assert (asked, io.close()) == ([100], True)
