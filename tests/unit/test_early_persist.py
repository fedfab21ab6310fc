"""Early persist with real threads: what is written, what PERSIST jobs come to, and that no refilled page is stored."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mover_support import DEADLINE_S, NAMESPACE, HeldStore, Rank, blob_of, page_hash, storage_key, until

from kvhoist import early_persist
from kvhoist.early_persist import EarlyPersist
from kvhoist.errors import ClosedError
from kvhoist.messages import Job, JobKind
from kvhoist.platform.cpu import CpuEvent
from kvhoist.storage import FileStore, MemoryStore, Sealer
from kvhoist.storage.io import StorageIO
from kvhoist.storage.outcomes import CANCELLED, NOT_STORED, QUEUE_FULL

ONE_BY_ONE = {"num_threads": 1, "chunk_bytes": 1}
"""Storage takes page after page, so that one page of a batch is held and the others have not begun."""


@pytest.fixture
def store() -> Iterator[HeldStore]:
    held = HeldStore()
    yield held
    held.gate.set()


def early(store: Any, **options: Any) -> Rank:
    return Rank(store=store, early_persist=True, **options)


def contents(store: HeldStore) -> dict[Any, bytes]:
    """Return what the store holds by key, read as `get` reads it, after checking that no other bytes passed."""
    found = {}
    for key, _ in store.records():
        buffer = memoryview(bytearray(len(blob_of(0))))
        store.get([key], [buffer])
        found[key] = bytes(buffer)
    return found


def check_stored(store: HeldStore, *numbers: int) -> None:
    assert contents(store) == {storage_key(number): blob_of(number) for number in numbers}


# -- what is written, and when -------------------------------------------------------------------------------------


def test_a_page_reaches_storage_after_its_offload_without_being_asked_for(store: HeldStore) -> None:
    with early(store) as rank:
        rank.offload([1, 2], [3, 0])
        assert rank.mover.wait_idle(DEADLINE_S)
        check_stored(store, 1, 2)
        assert [answer.id for answer in rank.answers] == [0]


def test_it_is_off_unless_asked_for(store: HeldStore) -> None:
    with Rank(store=store) as rank:
        rank.offload([1], [0])
        assert rank.mover.wait_idle(DEADLINE_S)
        assert store.begun == []


def test_the_offload_is_answered_while_storage_still_writes(store: HeldStore) -> None:
    store.gate.clear()
    with early(store) as rank:
        assert rank.offload([1], [0]).error is None
        until(lambda: bool(store.begun))
        store.gate.set()


def test_a_persist_job_is_answered_at_once_where_the_early_write_is_done(store: HeldStore) -> None:
    with early(store) as rank:
        rank.offload([1, 2], [3, 0])
        assert rank.mover.wait_idle(DEADLINE_S)
        store.gate.clear()
        transfer = rank.submit(JobKind.PERSIST, [2, 1], [0, 3])
        assert transfer.done
        assert transfer.completion is not None
        assert (transfer.completion.failed_pages, transfer.completion.error) == ((), None)
        assert transfer.completion.bytes == 2 * rank.group.page_bytes
        assert transfer.completion.seconds > 0


def test_a_persist_job_waits_for_an_early_write_under_way(store: HeldStore) -> None:
    store.gate.clear()
    with early(store) as rank:
        rank.offload([1, 2], [3, 0])
        transfer = rank.submit(JobKind.PERSIST, [1, 2], [3, 0])
        until(lambda: len(store.begun) == 2)
        assert not transfer.done
        store.gate.set()
        assert transfer.result(DEADLINE_S).error is None
        check_stored(store, 1, 2)


def test_a_page_is_put_once_whether_the_persist_job_comes_early_or_late(store: HeldStore) -> None:
    with early(store) as rank:
        store.gate.clear()
        rank.offload([1, 2], [3, 0])
        transfer = rank.submit(JobKind.PERSIST, [1, 2], [3, 0])
        store.gate.set()
        transfer.result(DEADLINE_S)
        rank.offload([3, 4], [1, 2])
        assert rank.mover.wait_idle(DEADLINE_S)
        rank.run(JobKind.PERSIST, [3, 4], [1, 2])
    assert store.num_put == dict.fromkeys(map(storage_key, (1, 2, 3, 4)), 1)


@pytest.mark.parametrize("late", [False, True])
def test_a_file_store_writes_a_page_once_for_an_early_write_and_a_persist_job(tmp_path: Path, late: bool) -> None:
    with FileStore(tmp_path / "store", capacity="8MiB") as files:
        with early(files) as rank:
            rank.offload([1, 2], [3, 0])
            if late:
                assert rank.mover.wait_idle(DEADLINE_S)
            assert rank.run(JobKind.PERSIST, [1, 2], [3, 0]).error is None
            again = rank.run(JobKind.PERSIST, [1, 2], [3, 0])
            assert (again.error, again.bytes) == (None, 2 * rank.group.page_bytes)
        assert (files.stats().put_pages, files.stats().num_pages) == (2, 2)
        files.audit()


def test_a_key_that_storage_holds_is_not_written_again_by_an_early_write(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", capacity="8MiB") as files:
        with early(files) as rank:
            rank.offload([1], [3])
            rank.offload([1], [2])
            assert rank.mover.wait_idle(DEADLINE_S)
        assert (files.stats().put_pages, files.stats().num_pages) == (1, 1)


def test_pages_without_an_early_write_are_written_then(store: HeldStore) -> None:
    with early(store) as rank:
        MemoryPages(rank).fill(9, 1)
        rank.offload([1], [0])
        done = rank.run(JobKind.PERSIST, [9, 1], [1, 0])
        assert (done.error, done.bytes) == (None, 2 * rank.group.page_bytes)
        check_stored(store, 1, 9)


class MemoryPages:
    """Host pages that came to the arena some other way than by an offload of this mover."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def fill(self, number: int, host_page: int) -> None:
        self._rank.arena.page(host_page)[:] = blob_of(number)


def test_an_early_write_of_another_key_answers_nothing(store: HeldStore) -> None:
    with early(store) as rank:
        rank.offload([1], [0])
        assert rank.mover.wait_idle(DEADLINE_S)
        MemoryPages(rank).fill(2, 0)
        assert rank.run(JobKind.PERSIST, [2], [0]).error is None
        check_stored(store, 1, 2)


def test_a_page_whose_offload_failed_is_not_persisted(store: HeldStore) -> None:
    with early(store) as rank:
        assert rank.run(JobKind.OFFLOAD, [1], [0], blocks=[0, 99]).failed_pages == (0,)
        assert rank.mover.wait_idle(DEADLINE_S)
        assert store.begun == []


def test_a_persist_job_that_the_answer_to_the_offload_brings_about_is_answered_by_the_early_write(
    store: HeldStore,
) -> None:
    """In one process the control plane orders it from within `on_complete`, before the early write is started."""
    with early(store) as rank:
        orders: list[Any] = []

        def order(answer: Any) -> None:
            if answer.id == 0:
                orders.append(rank.submit(JobKind.PERSIST, [1, 2], [3, 0]))

        rank.on_answer = order
        rank._next_id = 1
        rank.compute(1, 0)
        rank.compute(2, 1)
        keys = tuple(map(page_hash, (1, 2)))
        rank.mover.submit(Job(0, JobKind.OFFLOAD, NAMESPACE, 0, keys, (3, 0), (0, 1, 2, 3))).result(DEADLINE_S)
        assert orders[0].result(DEADLINE_S).error is None
    assert store.num_put == {storage_key(1): 1, storage_key(2): 1}


@pytest.mark.parametrize("fill", [JobKind.OFFLOAD, JobKind.PREFETCH])
def test_a_page_that_the_answer_to_the_offload_gives_away_is_not_written_early(store: HeldStore, fill: JobKind) -> None:
    with Rank(store=store) as other:
        other.offload([2], [0])
        other.run(JobKind.PERSIST, [2], [0])
    with early(store) as rank:
        orders: list[Any] = []

        def order(answer: Any) -> None:
            if answer.id == 0:
                orders.append(rank.submit(fill, [2], [0], [1] if fill is JobKind.OFFLOAD else []))

        rank.on_answer = order
        rank._next_id = 1
        rank.compute(1, 0)
        rank.compute(2, 1)
        rank.mover.submit(Job(0, JobKind.OFFLOAD, NAMESPACE, 0, (page_hash(1),), (0,), (0, 1))).result(DEADLINE_S)
        assert orders[0].result(DEADLINE_S).error is None
        assert bytes(rank.arena.page(0)) == blob_of(2)
        assert rank.mover.wait_idle(DEADLINE_S)
        assert contents(store)[storage_key(2)] == blob_of(2)
        assert contents(store).get(storage_key(1), blob_of(1)) == blob_of(1)


# -- failures ------------------------------------------------------------------------------------------------------


def test_an_early_failure_fails_the_page_in_the_persist_job_with_its_reason_and_once(store: HeldStore) -> None:
    with early(store) as rank:
        store.fault = OSError(5, "planted")
        rank.offload([1, 2], [3, 0])
        assert rank.mover.wait_idle(DEADLINE_S)
        store.fault = None
        failed = rank.run(JobKind.PERSIST, [1, 2], [3, 0])
        assert (failed.failed_pages, failed.bytes) == ((0, 1), 0)
        assert "planted" in str(failed.error)
        assert rank.run(JobKind.PERSIST, [1, 2], [3, 0]).error is None
        check_stored(store, 1, 2)


def test_a_store_without_room_fails_the_page(store: HeldStore) -> None:
    store.full = True
    with early(store) as rank:
        rank.offload([1], [0])
        assert rank.run(JobKind.PERSIST, [1], [0]).error == f"1 x {NOT_STORED}"


def test_what_the_queue_did_not_take_early_fails_and_the_rest_is_stored(store: HeldStore) -> None:
    store.gate.clear()
    with early(store, io_options={"max_queued_pages": 1, **ONE_BY_ONE}) as rank:
        rank.offload([1], [0])
        until(lambda: bool(store.begun))
        rank.offload([2, 3], [1, 2])
        transfer = rank.submit(JobKind.PERSIST, [1, 2, 3], [0, 1, 2])
        store.gate.set()
        done = transfer.result(DEADLINE_S)
        assert (done.failed_pages, done.error) == ((2,), f"1 x {QUEUE_FULL}")
        assert done.bytes == 2 * rank.group.page_bytes
        check_stored(store, 1, 2)


# -- a page that is filled again -----------------------------------------------------------------------------------


def test_an_offload_waits_for_the_early_write_that_still_reads_its_page(store: HeldStore) -> None:
    store.gate.clear()
    with early(store) as rank:
        rank.offload([1], [0])
        until(lambda: bool(store.begun))
        rank.compute(2, 0)
        started = time.monotonic()
        second = rank.submit(JobKind.OFFLOAD, [2], [0], [0])
        assert time.monotonic() - started < DEADLINE_S / 2, "submit waited"
        until(lambda: 1 in rank.mover._begun)
        with pytest.raises(TimeoutError):
            second.result(0.05)
        assert bytes(rank.arena.page(0)) == blob_of(1)
        store.gate.set()
        assert second.result(DEADLINE_S).error is None
        assert bytes(rank.arena.page(0)) == blob_of(2)
        assert rank.mover.wait_idle(DEADLINE_S)
        check_stored(store, 1, 2)


def test_without_that_rule_another_pages_bytes_would_be_stored(
    store: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the check above sees what the rule prevents."""
    monkeypatch.setattr(EarlyPersist, "make_way", lambda self, job: [])
    store.gate.clear()
    with early(store) as rank:
        rank.offload([1], [0])
        until(lambda: bool(store.begun))
        rank.offload([2], [0])
        store.gate.set()
        until(lambda: storage_key(1) in contents(store))
        assert contents(store)[storage_key(1)] == blob_of(2) != blob_of(1)


def test_an_offload_waits_for_its_producer_before_it_cancels_an_early_write(store: HeldStore) -> None:
    producer = CpuEvent()
    with early(store) as rank:
        rank.offload([1], [0])
        rank.compute(2, 0)
        second = rank.submit(JobKind.OFFLOAD, [2], [0], [0], after=producer)
        until(lambda: storage_key(1) in store.written)
        producer.set()
        assert second.result(DEADLINE_S).error is None
        assert rank.mover.wait_idle(DEADLINE_S)
        check_stored(store, 1, 2)


def test_an_early_write_that_has_not_begun_is_cancelled_for_who_fills_its_page(store: HeldStore) -> None:
    store.gate.clear()
    with early(store, io_options=ONE_BY_ONE) as rank:
        rank.offload([1], [0])
        until(lambda: bool(store.begun))
        rank.offload([2], [1])
        assert rank.offload([3], [1]).error is None
        store.gate.set()
        assert rank.mover.wait_idle(DEADLINE_S)
        check_stored(store, 1, 3)


def test_a_prefetch_waits_for_the_early_write_that_still_reads_its_page_and_submit_does_not(store: HeldStore) -> None:
    with Rank(store=store) as other:
        other.offload([7], [0])
        other.run(JobKind.PERSIST, [7], [0])
    store.gate.clear()
    store.begun.clear()
    with early(store) as rank:
        rank.offload([1], [0])
        until(lambda: bool(store.begun))
        started = time.monotonic()
        prefetch = rank.submit(JobKind.PREFETCH, [7], [0])
        assert time.monotonic() - started < DEADLINE_S / 2, "submit waited"
        with pytest.raises(TimeoutError):
            prefetch.result(0.05)
        assert bytes(rank.arena.page(0)) == blob_of(1)
        store.gate.set()
        assert prefetch.result(DEADLINE_S).error is None
        assert bytes(rank.arena.page(0)) == blob_of(7)
        check_stored(store, 1, 7)


def test_a_prefetch_that_waits_can_be_cancelled(store: HeldStore) -> None:
    store.gate.clear()
    with early(store) as rank:
        rank.offload([1], [0])
        until(lambda: bool(store.begun))
        prefetch = rank.submit(JobKind.PREFETCH, [7], [0])
        assert rank.mover.cancel(prefetch.job.id)
        store.gate.set()
        cancelled = prefetch.result(DEADLINE_S)
        assert (cancelled.failed_pages, cancelled.error) == ((0,), CANCELLED)
        assert bytes(rank.arena.page(0)) == blob_of(1)


@pytest.mark.parametrize("fill", [JobKind.OFFLOAD, JobKind.PREFETCH])
def test_a_page_that_was_filled_again_is_not_answered_by_the_early_write_of_its_old_bytes(
    store: HeldStore, fill: JobKind
) -> None:
    """The control plane failed page 1 because of another rank, and gave its host page to page 2."""
    with Rank(store=store) as other:
        other.offload([2], [0])
        other.run(JobKind.PERSIST, [2], [0])
    with early(store) as rank:
        rank.offload([1], [0])
        assert rank.mover.wait_idle(DEADLINE_S)
        if fill is JobKind.OFFLOAD:
            rank.offload([2], [0])
        else:
            rank.run(fill, [2], [0])
        assert rank.run(JobKind.PERSIST, [2], [0]).error is None
        check_stored(store, 1, 2)


def test_pages_whose_early_write_was_given_up_for_a_neighbours_sake_are_written_for_the_persist_job(
    store: HeldStore,
) -> None:
    store.gate.clear()
    with early(store, io_options=ONE_BY_ONE) as rank:
        rank.offload([1, 2, 3], [0, 1, 2])
        until(lambda: bool(store.begun))
        waiting = rank.submit(JobKind.PERSIST, [1, 3], [0, 2])
        rank.compute(4, 5)
        refill = rank.submit(JobKind.OFFLOAD, [4], [1], [5])
        until(lambda: rank.io.stats().cancelled_pages == 2)
        assert not waiting.done
        store.gate.set()
        assert refill.result(DEADLINE_S).error is None
        done = waiting.result(DEADLINE_S)
        assert (done.error, done.bytes) == (None, 2 * rank.group.page_bytes)
        assert rank.run(JobKind.PERSIST, [4], [1]).error is None
        check_stored(store, 1, 3, 4)


def test_early_writes_that_nobody_asks_for_do_not_pile_up(store: HeldStore) -> None:
    with early(store) as rank:
        for number in range(40):
            rank.offload([number, number + 100], [number % 4, (number + 1) % 4])
            assert rank.mover._early.num_unclaimed <= 4
        assert rank.mover.wait_idle(DEADLINE_S)
        rank.run(JobKind.PERSIST, [39, 139], [3, 0])
        assert rank.mover._early.num_unclaimed == 2
        rank.run(JobKind.PREFETCH, [0, 1], [1, 2])
        assert rank.mover._early.num_unclaimed == 0


def test_a_load_does_not_wait_for_an_early_write(store: HeldStore) -> None:
    store.gate.clear()
    with early(store) as rank:
        rank.offload([1], [0])
        until(lambda: bool(store.begun))
        assert rank.run(JobKind.LOAD, [1], [0], [3]).error is None
        assert rank.holds(1, 3)
        store.gate.set()


# -- keys that are dropped -----------------------------------------------------------------------------------------


def test_a_dropped_key_does_not_come_back_by_an_early_write_under_way(store: HeldStore) -> None:
    store.gate.clear()
    with early(store) as rank:
        rank.offload([1, 2], [0, 1])
        until(lambda: len(store.begun) == 2)
        drop = rank.submit(JobKind.DROP, [1])
        with pytest.raises(TimeoutError):
            drop.result(0.05)
        store.gate.set()
        assert drop.result(DEADLINE_S).error is None
        assert rank.mover.wait_idle(DEADLINE_S)
        check_stored(store, 2)


def test_a_page_persisted_after_its_key_was_dropped_is_written_again(store: HeldStore) -> None:
    with early(store) as rank:
        rank.offload([1], [0])
        assert rank.mover.wait_idle(DEADLINE_S)
        rank.run(JobKind.DROP, [1])
        check_stored(store)
        assert rank.run(JobKind.PERSIST, [1], [0]).error is None
        check_stored(store, 1)


# -- cancelling and closing ----------------------------------------------------------------------------------------


def test_a_persist_job_that_waits_for_an_early_write_can_be_cancelled(store: HeldStore) -> None:
    store.gate.clear()
    with early(store, io_options=ONE_BY_ONE) as rank:
        rank.offload([1], [0])
        until(lambda: bool(store.begun))
        rank.offload([2], [1])
        waiting = rank.submit(JobKind.PERSIST, [2], [1])
        assert rank.mover.cancel(waiting.job.id)
        cancelled = waiting.result(DEADLINE_S)
        assert (cancelled.failed_pages, cancelled.error) == ((0,), f"1 x {CANCELLED}")
        begun = rank.submit(JobKind.PERSIST, [1], [0])
        assert not rank.mover.cancel(begun.job.id)
        store.gate.set()
        assert begun.result(DEADLINE_S).error is None
        check_stored(store, 1)


def test_waiting_for_idle_waits_for_early_writes(store: HeldStore) -> None:
    store.gate.clear()
    with early(store) as rank:
        rank.offload([1], [0])
        assert rank.mover.num_open == 0
        assert not rank.mover.wait_idle(0.05)
        threading.Timer(0.05, store.gate.set).start()
        assert rank.mover.wait_idle(DEADLINE_S)
        check_stored(store, 1)


def test_closing_with_drain_waits_for_early_writes(store: HeldStore) -> None:
    store.gate.clear()
    with early(store, io_options=ONE_BY_ONE) as rank:
        for number in range(4):
            rank.offload([number], [number])
        threading.Timer(0.05, store.gate.set).start()
        assert rank.mover.close(drain=True, timeout_s=DEADLINE_S)
        check_stored(store, 0, 1, 2, 3)


def test_closing_with_drain_is_bounded_when_storage_hangs_and_cancels_what_has_not_begun(store: HeldStore) -> None:
    store.gate.clear()
    with early(store, io_options=ONE_BY_ONE) as rank:
        rank.offload([1, 2], [0, 1])
        until(lambda: bool(store.begun))
        started = time.monotonic()
        assert not rank.mover.close(drain=True, timeout_s=0.05)
        assert time.monotonic() - started < DEADLINE_S / 2
        store.gate.set()
        assert rank.mover.close(timeout_s=DEADLINE_S)
        check_stored(store, 1)


def test_closing_is_bounded_while_an_offload_waits_for_a_store_that_hangs(store: HeldStore) -> None:
    store.gate.clear()
    with early(store) as rank:
        rank.offload([1], [0])
        until(lambda: bool(store.begun))
        stuck = rank.submit(JobKind.OFFLOAD, [2], [0], [1])
        until(lambda: stuck.job.id in rank.mover._begun)
        assert not rank.mover.close(drain=False, timeout_s=0.05)
        assert not stuck.done
        store.gate.set()
        assert stuck.result(DEADLINE_S).id == 1


def test_closing_without_drain_cancels_early_writes_and_begins_none(store: HeldStore) -> None:
    store.gate.clear()
    producer = CpuEvent()
    with early(store, io_options=ONE_BY_ONE) as rank:
        rank.offload([1, 2, 3], [0, 1, 2])
        until(lambda: bool(store.begun))
        waiting = rank.submit(JobKind.PERSIST, [2, 3], [1, 2])
        rank.compute(4, 0)
        late = rank.submit(JobKind.OFFLOAD, [4], [3], [0], after=producer)
        until(lambda: late.job.id in rank.mover._begun)
        closer = threading.Thread(target=rank.mover.close, kwargs={"drain": False, "timeout_s": DEADLINE_S})
        closer.start()
        until(lambda: rank.io.stats().cancelled_pages == 2)
        producer.set()
        late.result(DEADLINE_S)
        store.gate.set()
        closer.join(DEADLINE_S)
        assert not closer.is_alive()
        assert waiting.result(0).failed_pages == (0, 1)
        check_stored(store, 1)
        with pytest.raises(ClosedError):
            rank.submit(JobKind.PERSIST, [1], [0])


@pytest.mark.parametrize("drain", [False, True])
def test_a_callback_of_an_offload_may_close_the_mover(store: HeldStore, drain: bool) -> None:
    store.gate.clear()
    with early(store) as rank:
        closed: list[bool] = []
        rank.compute(1, 0)
        transfer = rank.submit(JobKind.OFFLOAD, [1], [0], [0])
        transfer.add_done_callback(lambda _: closed.append(rank.mover.close(drain=drain, timeout_s=DEADLINE_S)))
        transfer.result(DEADLINE_S)
        store.gate.set()
        until(lambda: bool(closed))
        assert closed == [True]
        if drain:
            check_stored(store, 1)


def test_an_offload_succeeds_although_the_storage_io_is_closed(store: HeldStore) -> None:
    with early(store) as rank:
        assert rank.io.close()
        assert rank.offload([1], [0]).error is None
        assert rank.mover.wait_idle(DEADLINE_S)
        assert "storage I/O was closed" in str(rank.run(JobKind.PERSIST, [1], [0]).error)
        with pytest.raises(ClosedError, match="storage I/O"):
            rank.submit(JobKind.PERSIST, [1], [0])


def test_storage_that_closes_under_waiting_persist_jobs_answers_them(store: HeldStore) -> None:
    store.gate.clear()
    with early(store, io_options=ONE_BY_ONE) as rank:
        rank.offload([1, 2], [0, 1])
        until(lambda: bool(store.begun))
        waiting = rank.submit(JobKind.PERSIST, [1, 2], [0, 1])
        assert not rank.io.close(drain=False, timeout_s=0.05)
        store.gate.set()
        done = waiting.result(DEADLINE_S)
        assert done.failed_pages == (1,)
        assert "closed" in str(done.error)


class OneHangs(HeldStore):
    """Holds the page number 3 up, and no other."""

    def put(self, keys: Any, headers: Any, blobs: Any) -> list[bool]:
        if storage_key(3) in keys:
            return super().put(keys, headers, blobs)
        return MemoryStore.put(self, keys, headers, blobs)


@pytest.mark.parametrize("asked_before", [True, False], ids=["asked before it hung", "asked when it hung"])
def test_a_write_that_hangs_in_one_page_keeps_that_page_alone(
    asked_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_persist, "_MOST_WAIT_S", 0.05)
    store = OneHangs()
    store.gate.clear()
    with early(store, io_options={"num_threads": 4, "chunk_bytes": 1, "hang_s": 0.1}) as rank:
        rank.offload([1, 2, 3], [0, 1, 2])
        if not asked_before:
            until(lambda: rank.io.stats().fenced)
        waiting = rank.submit(JobKind.PERSIST, [2, 3, 1], [1, 2, 0])
        until(lambda: rank.answers[-1].pending_pages == (1,))
        part = rank.answers[-1]
        assert (part.id, part.failed_pages, part.error) == (waiting.job.id, (), None)
        assert part.bytes == 2 * rank.group.page_bytes
        assert not waiting.done
        assert rank.offload([5], [0]).error is None, "the page beside the hung one is free"
        assert rank.offload([6], [2]).failed_pages == (0,), "storage reads this one"
        store.gate.set()
        assert waiting.result(DEADLINE_S).failed_pages == ()
        assert rank.mover.wait_idle(DEADLINE_S)
    assert {storage_key(number) for number in (1, 2, 3)} <= contents(store).keys()


def test_a_page_that_a_detached_store_still_reads_is_held_by_the_job_that_asks_for_it() -> None:
    store = OneHangs()
    store.gate.clear()
    with early(store, io_options=ONE_BY_ONE | {"num_threads": 4}) as rank:
        rank.offload([3, 1], [0, 1])
        until(lambda: storage_key(3) in store.begun)
        until(lambda: rank.io.stats().persisted_pages == 1)
        rank.mover.detach(drain=True)
        asked = rank.submit(JobKind.PERSIST, [3, 2], [0, 2])
        assert not asked.done, "its page is not to be given away"
        store.gate.set()
        done = asked.result(DEADLINE_S)
        assert done.failed_pages == (1,)
        assert "needs a store" in str(done.error)
        with pytest.raises(ClosedError, match="needs a store"):
            rank.mover.submit(Job(99, JobKind.PERSIST, NAMESPACE, 0, (page_hash(3),), (0,)))


def test_what_a_detached_store_is_written_answers_for_no_other() -> None:
    old, new = OneHangs(), HeldStore()
    old.gate.clear()
    with early(old) as rank:
        rank.offload([3], [0])
        until(lambda: storage_key(3) in old.begun)
        rank.mover.detach(drain=True)
        io = StorageIO(new, Sealer())
        rank.mover.attach(io)
        assert rank.submit(JobKind.PERSIST, [3], [0]).result(DEADLINE_S).error is None
        check_stored(new, 3)
        old.gate.set()
        assert io.close(timeout_s=DEADLINE_S)


def test_many_threads_and_few_pages_each_job_is_answered_once_and_each_blob_is_its_keys(store: HeldStore) -> None:
    """Two callers at once, one for host pages 0 and 1, one for 2 and 3; every third page is given up unasked for."""
    with early(store, io_options={"num_threads": 3, "chunk_bytes": 1}) as rank:

        def live(first: int) -> None:
            for turn in range(60):
                number, host_page, device_page = 1000 * first + turn, first + turn % 2, first + 1
                rank.compute(number, device_page)
                assert submit(JobKind.OFFLOAD, [number], [host_page], [device_page]).result(DEADLINE_S).error is None
                if turn % 3:
                    assert submit(JobKind.PERSIST, [number], [host_page]).result(DEADLINE_S).error is None
                if turn % 5 == 4:
                    back = submit(JobKind.PREFETCH, [number - 2], [host_page]).result(DEADLINE_S)
                    assert back.failed_pages or bytes(rank.arena.page(host_page)) == blob_of(number - 2)

        lock = threading.Lock()

        def submit(*arguments: Any) -> Any:
            with lock:
                return rank.submit(*arguments)

        failures: list[BaseException] = []

        def run(first: int) -> None:
            try:
                live(first)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=run, args=(first,)) for first in (0, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert failures == []
        assert rank.mover.wait_idle(DEADLINE_S)
        found = contents(store)
        numbers = {
            storage_key(n).page.chain_hash: n for first in (0, 2) for n in range(1000 * first, 1000 * first + 60)
        }
        assert all(blob == blob_of(numbers[key.page.chain_hash]) for key, blob in found.items())
        persisted = {page_hash(1000 * first + turn) for first in (0, 2) for turn in range(60) if turn % 3}
        assert persisted <= {key.page.chain_hash for key in found}
