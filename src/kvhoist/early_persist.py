"""Early persist: pages go to storage as soon as they are offloaded, and that answers the PERSIST job that follows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvhoist.errors import ClosedError
from kvhoist.memory.arena import HostArena
from kvhoist.messages import Job, JobKind, Shard, StorageKey
from kvhoist.storage.io import StorageIO
from kvhoist.storage.outcomes import CANCELLED, PageOutcomes


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """An early write of one page: place `index` of the batch whose outcomes `future` brings."""

    key: StorageKey
    future: Future[PageOutcomes]
    index: int


class Persisting(NamedTuple):
    """A PERSIST job under way: its outcomes, and the call that cancels what of it has not begun."""

    future: Future[PageOutcomes]
    cancel: Callable[[], bool]


class EarlyPersist:
    """The early writes of one rank. Thread-safe; no lock is held while storage is called or a future completes.

    Whoever fills a host page calls `make_way` and waits for what it returns: until then storage may read that page. Of
    writes that no PERSIST job asked for, the newest of each host page is remembered, until the page is filled again.
    """

    def __init__(self, io: StorageIO, arena: HostArena, shard: Shard) -> None:
        self._io = io
        self._arena = arena
        self._shard = shard
        self._stopped = threading.Event()
        self._unclaimed: dict[int, _Write] = {}
        self._reading: dict[int, _Write] = {}
        self._changed = threading.Condition()

    @property
    def num_unclaimed(self) -> int:
        """Host pages whose early write no PERSIST job has asked for."""
        return len(self._unclaimed)

    def begin(self, job: Job) -> None:
        """Hand the pages of an OFFLOAD job, all of whose bytes are in place, to storage. Nothing once stopped."""
        if self._stopped.is_set():
            return
        keys = [StorageKey(job.page_key(i), self._shard) for i in range(job.num_pages)]
        try:
            future = self._io.persist(keys, [self._arena.page(page) for page in job.host_pages])
        except ClosedError:  # no early write: the PERSIST job finds the same
            return
        writes = {page: _Write(keys[i], future, i) for i, page in enumerate(job.host_pages)}
        with self._changed:
            self._unclaimed.update(writes)
            self._reading.update(writes)
        future.add_done_callback(partial(self._ended, job.host_pages))
        if self._stopped.is_set():  # meanwhile: `stop` may not have seen it
            self._io.cancel(future)

    def persist(self, job: Job, keys: Sequence[StorageKey]) -> Persisting:
        """Answer a PERSIST job: from the early writes of its pages, and by writing those that have none.

        Raises ClosedError where the storage I/O is closed and nothing was written early, as the arena does for a page
        that it does not have.
        """
        with self._changed:
            found = {i: self._unclaimed.pop(page) for i, page in enumerate(job.host_pages) if page in self._unclaimed}
        found = {i: write for i, write in found.items() if write.key == keys[i]}
        if not found:
            future = self._io.persist(keys, [self._arena.page(page) for page in job.host_pages])
            return Persisting(future, partial(self._io.cancel, future))
        gathered = _Gathered(self._io, self._arena, keys, job.host_pages)
        gathered.write([i for i in range(job.num_pages) if i not in found])
        batches: dict[Future[PageOutcomes], list[tuple[int, int]]] = {}
        for i, write in found.items():
            batches.setdefault(write.future, []).append((i, write.index))
        for future, places in batches.items():
            gathered.take(future, places, again=True)
        return Persisting(gathered.future, gathered.cancel)

    def make_way(self, job: Job) -> list[Future[PageOutcomes]]:
        """Forget the early writes of the host pages that `job` fills, or of the keys that it drops; cancel those that
        have not begun, and return those still running: the job must not begin before they are done. Never blocks."""
        with self._changed:
            if job.kind is JobKind.DROP:
                dropped = {job.page_key(i) for i in range(job.num_pages)}
                writes = [*self._unclaimed.items(), *self._reading.items()]
                pages = [page for page, write in writes if write.key.page in dropped]
            else:
                pages = list(job.host_pages) if job.kind in (JobKind.OFFLOAD, JobKind.PREFETCH) else []
            for page in pages:
                self._unclaimed.pop(page, None)
            running = list({self._reading[page].future for page in pages if page in self._reading})
        for future in running:
            self._io.cancel(future)
        return [future for future in running if not future.done()]

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Block until no early write is under way; False when `timeout_s` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._reading, timeout_s)

    def stop(self) -> None:
        """Begin no more early writes, and cancel those that storage has not begun. Idempotent, never blocks."""
        self._stopped.set()
        with self._changed:
            running = {write.future for write in self._reading.values()}
        for future in running:
            self._io.cancel(future)

    def _ended(self, host_pages: Sequence[int], future: Future[PageOutcomes]) -> None:
        with self._changed:
            for page in host_pages:
                write = self._reading.get(page)
                if write is not None and write.future is future:
                    del self._reading[page]
            self._changed.notify_all()


class _Gathered:
    """A PERSIST job whose outcomes come from several batches."""

    def __init__(self, io: StorageIO, arena: HostArena, keys: Sequence[StorageKey], host_pages: Sequence[int]) -> None:
        self.future: Future[PageOutcomes] = Future()
        self.future.set_running_or_notify_cancel()  # it ends by `cancel` below, never by a cancel of its own
        self._io = io
        self._arena = arena
        self._keys = keys
        self._host_pages = host_pages
        self._reasons: list[str | None] = [None] * len(keys)
        self._left_pages = len(keys)
        self._seconds = 0.0
        self._cancelled = False
        self._batches: list[Future[PageOutcomes]] = []
        self._lock = threading.Lock()

    def write(self, indices: Sequence[int]) -> None:
        """Write these pages of the job for the job itself."""
        if not indices:
            return
        try:
            blobs = [self._arena.page(self._host_pages[i]) for i in indices]
            future = self._io.persist([self._keys[i] for i in indices], blobs)
        except ClosedError as error:
            self._book(indices, [str(error)] * len(indices), 0.0)
            return
        self.take(future, [(i, place) for place, i in enumerate(indices)], again=False)

    def take(self, batch: Future[PageOutcomes], places: Sequence[tuple[int, int]], *, again: bool) -> None:
        """Let page `i` of the job come to what page `place` of `batch` comes to, for all `(i, place)`. With `again` a
        page that the batch gave up for another's sake is written for the job itself."""
        with self._lock:
            self._batches.append(batch)
        batch.add_done_callback(partial(self._done, places, again))

    def cancel(self) -> bool:
        """As StorageIO.cancel."""
        with self._lock:
            self._cancelled = True
            batches = [batch for batch in self._batches if not batch.done()]
        return sum(self._io.cancel(batch) for batch in batches) > 0

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
            num_bytes = self._reasons.count(None) * self._arena.layout.group.page_bytes
            outcomes = PageOutcomes(tuple(self._reasons), num_bytes, self._seconds)
        self.future.set_result(outcomes)
