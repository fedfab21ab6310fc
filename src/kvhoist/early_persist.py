"""Early persist: pages go to storage as soon as they are offloaded, and that answers the PERSIST job that follows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from kvhoist.errors import ClosedError
from kvhoist.memory.arena import HostArena
from kvhoist.messages import Job, JobKind, Shard, StorageKey
from kvhoist.storage.io import StorageIO
from kvhoist.storage.outcomes import CANCELLED, PageOutcomes

_MOST_WAIT_S = 1.0
"""How long jobs wait for an early write that storage has begun. One that takes longer hangs; an engine that waits for
the job, since it needs the job's blocks, must not hang with it."""


class Persisting(NamedTuple):
    """Pages on their way to storage: their outcomes, and the call that cancels what of them has not begun."""

    future: Future[PageOutcomes]
    cancel: Callable[[], bool]


class _Batch:
    """The early write of the pages of one OFFLOAD job, announced first and started a little later."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.future: Future[PageOutcomes] = Future()
        self.awaited_until: float | None = None
        self._cancel_write: Callable[[], bool] | None = None

    def start(self, write: Callable[[Job], Persisting]) -> None:
        """Hand the pages to storage, unless they were cancelled first."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            written, self._cancel_write = write(self.job)
        except Exception as error:  # whatever it is: who waits to fill these pages must not wait for ever
            self.future.set_result(PageOutcomes((_reason(error),) * self.job.num_pages))
            return
        written.add_done_callback(self._end)

    def cancel(self) -> bool:
        """As StorageIO.cancel; False also in the instant in which storage takes the pages."""
        if self.future.cancel():
            return True
        return self._cancel_write is not None and self._cancel_write()

    def _end(self, written: Future[PageOutcomes]) -> None:
        cancelled = PageOutcomes((CANCELLED,) * self.job.num_pages)
        self.future.set_result(cancelled if written.cancelled() else written.result())


class EarlyPersist:
    """The early writes of one rank. Thread-safe; no lock is held while storage is called or a future completes.

    Whoever fills a host page calls `await_way` first: until then storage may read that page. Of
    writes that no PERSIST job asked for, the newest of each host page is remembered, until the page is filled again.
    """

    def __init__(self, arena: HostArena, shard: Shard) -> None:
        self._io: StorageIO | None = None
        self._early = False
        self._arena = arena
        self._shard = shard
        self._unclaimed: dict[int, tuple[_Batch, int]] = {}
        self._reading: dict[int, tuple[_Batch, int]] = {}
        self._changed = threading.Condition()

    @property
    def num_unclaimed(self) -> int:
        """Host pages whose early write no PERSIST job has asked for."""
        return len(self._unclaimed)

    def attach(self, io: StorageIO, *, early: bool) -> None:
        """Write to `io` from now on; without `early` only what a PERSIST job asks for."""
        with self._changed:
            self._io, self._early = io, early

    def announce(self, job: Job) -> Callable[[], None] | None:
        """Announce the early write of an OFFLOAD job whose bytes are in place: before the job is answered, since its
        pages may be asked for or given away from then on. Returns the call that starts the write, which must follow;
        None where pages are not written early."""
        batch = _Batch(job)
        writes = {page: (batch, i) for i, page in enumerate(job.host_pages)}
        with self._changed:
            io = self._io
            if io is None or not self._early:
                return None
            self._unclaimed.update(writes)
            self._reading.update(writes)
        batch.future.add_done_callback(partial(self._ended, batch))
        return partial(self._start, batch, io)

    def persist(self, job: Job) -> Persisting:
        """Answer a PERSIST job: from the early writes of its pages, and by writing those that have none.

        Where none has one it raises ClosedError (the storage I/O is closed, or there is none) or PageIdError (no such
        host page).
        """
        with self._changed:
            io = self._io
            found = {i: self._unclaimed.pop(page) for i, page in enumerate(job.host_pages) if page in self._unclaimed}
        found = {i: early for i, early in found.items() if early[0].job.page_key(early[1]) == job.page_key(i)}
        if not found:
            return self._write(io, job, range(job.num_pages))
        gathered = _Gathered(job, partial(self._write, io, job), self._arena.layout.group.page_bytes)
        gathered.write([i for i in range(job.num_pages) if i not in found])
        batches: dict[_Batch, list[tuple[int, int]]] = {}
        for i, (batch, place) in found.items():
            batches.setdefault(batch, []).append((i, place))
        for batch, places in batches.items():
            gathered.take(Persisting(batch.future, batch.cancel), places, again=True)
        return Persisting(gathered.future, gathered.cancel)

    def make_way(self, job: Job) -> list[_Batch]:
        """Forget the early writes of the host pages that `job` fills, or of the keys that it drops; cancel those that
        have not begun, and return those still running: the job must not begin before they are done. Never blocks."""
        with self._changed:
            if job.kind is JobKind.DROP:
                dropped = {job.page_key(i) for i in range(job.num_pages)}
                writes = [*self._unclaimed.items(), *self._reading.items()]
                pages = [page for page, (batch, i) in writes if batch.job.page_key(i) in dropped]
            else:
                pages = list(job.host_pages) if job.kind in (JobKind.OFFLOAD, JobKind.PREFETCH) else []
            for page in pages:
                self._unclaimed.pop(page, None)
            running = list({self._reading[page][0] for page in pages if page in self._reading})
        for batch in running:
            batch.cancel()
        return [batch for batch in running if not batch.future.done()]

    def await_way(self, job: Job) -> tuple[int, ...]:
        """`make_way`, and wait for what is still running. Returns the indices of pages that storage holds on to for
        longer than anyone may wait: the job must leave them alone, and fail them."""
        hung = set()
        for batch in self.make_way(job):
            if batch.awaited_until is None:
                batch.awaited_until = time.monotonic() + _MOST_WAIT_S
            futures.wait([batch.future], max(0.0, batch.awaited_until - time.monotonic()))
            if not batch.future.done():
                hung.add(batch)
        if not hung:
            return ()
        if job.kind is JobKind.DROP:
            return tuple(range(job.num_pages))
        held = {page for batch in hung for page in batch.job.host_pages}
        return tuple(i for i, page in enumerate(job.host_pages) if page in held)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Block until no early write is under way; False when `timeout_s` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._reading, timeout_s)

    def detach(self, *, drain: bool) -> None:
        """Start no more early writes and answer no PERSIST job from earlier ones; without `drain` cancel those that
        storage has not begun. Those under way keep their pages as before. Idempotent, never blocks."""
        with self._changed:
            self._io = None
            self._unclaimed.clear()
            running = {batch for batch, _ in self._reading.values()}
        for batch in () if drain else running:
            batch.cancel()

    def _start(self, batch: _Batch, io: StorageIO) -> None:
        if self._io is not io:
            batch.cancel()
        batch.start(lambda job: self._write(io, job, range(job.num_pages)))
        if self._io is not io:  # meanwhile: `detach` may have come too early to cancel it
            batch.cancel()

    def _write(self, io: StorageIO | None, job: Job, indices: Sequence[int]) -> Persisting:
        """Hand pages of the job to storage, now."""
        if io is None:
            raise no_store(job)
        keys = [StorageKey(job.page_key(i), self._shard) for i in indices]
        future = io.persist(keys, [self._arena.page(job.host_pages[i]) for i in indices])
        return Persisting(future, partial(io.cancel, future))

    def _ended(self, batch: _Batch, _: Future[PageOutcomes]) -> None:
        with self._changed:
            for page in batch.job.host_pages:
                if page in self._reading and self._reading[page][0] is batch:
                    del self._reading[page]
            self._changed.notify_all()


class _Gathered:
    """A PERSIST job whose outcomes come from several batches."""

    def __init__(self, job: Job, write: Callable[[Sequence[int]], Persisting], page_bytes: int) -> None:
        self.future: Future[PageOutcomes] = Future()
        self.future.set_running_or_notify_cancel()  # it ends by `cancel` below, never by a cancel of its own
        self._write = write
        self._page_bytes = page_bytes
        self._reasons: list[str | None] = [None] * job.num_pages
        self._left_pages = job.num_pages
        self._seconds = 0.0
        self._cancelled = False
        self._batches: list[Persisting] = []
        self._lock = threading.Lock()

    def write(self, indices: Sequence[int]) -> None:
        """Write these pages of the job for the job itself."""
        if not indices:
            return
        try:
            batch = self._write(indices)
        except Exception as error:  # in a callback nobody else would answer for these pages
            self._book(indices, [_reason(error)] * len(indices), 0.0)
            return
        self.take(batch, [(i, place) for place, i in enumerate(indices)], again=False)

    def take(self, batch: Persisting, places: Sequence[tuple[int, int]], *, again: bool) -> None:
        """Let page `i` of the job come to what page `place` of `batch` comes to, for all `(i, place)`. With `again` a
        page that the batch gave up for another's sake is written for the job itself."""
        with self._lock:
            self._batches.append(batch)
        batch.future.add_done_callback(partial(self._done, places, again))

    def cancel(self) -> bool:
        """As StorageIO.cancel."""
        with self._lock:
            self._cancelled = True
            batches = [batch for batch in self._batches if not batch.future.done()]
        return sum(batch.cancel() for batch in batches) > 0

    def _done(self, places: Sequence[tuple[int, int]], again: bool, batch: Future[PageOutcomes]) -> None:
        outcomes = None if batch.cancelled() else batch.result()
        reasons = {i: CANCELLED if outcomes is None else outcomes.reasons[place] for i, place in places}
        with self._lock:
            again = again and not self._cancelled
        given_up = [i for i, reason in reasons.items() if again and reason == CANCELLED]
        booked = [i for i in reasons if i not in given_up]
        if booked:
            self._book(booked, [reasons[i] for i in booked], outcomes.seconds if outcomes else 0.0)
        self.write(given_up)

    def _book(self, indices: Sequence[int], reasons: Sequence[str | None], seconds: float) -> None:
        with self._lock:
            for i, reason in zip(indices, reasons, strict=True):
                self._reasons[i] = reason
            self._seconds = max(self._seconds, seconds)
            self._left_pages -= len(indices)
            if self._left_pages:
                return
            num_bytes = self._reasons.count(None) * self._page_bytes
            outcomes = PageOutcomes(tuple(self._reasons), num_bytes, self._seconds)
        self.future.set_result(outcomes)


def no_store(job: Job) -> ClosedError:
    return ClosedError(f"a {job.kind} job needs a store, and none is attached")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
