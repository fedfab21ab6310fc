"""Early persist: pages go to storage as soon as they are offloaded, and that answers the PERSIST job that follows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial

from kvhoist.errors import ClosedError
from kvhoist.memory.arena import HostArena
from kvhoist.messages import Job, JobKind, Shard, StorageKey
from kvhoist.persisting import EarlyWrite, GatheredPersist, Persisting
from kvhoist.storage.io import StorageIO
from kvhoist.storage.outcomes import PENDING, PageOutcomes
from kvhoist.storage.queue import OnPart

_MOST_WAIT_S = 1.0
"""How long jobs wait for an early write that storage has begun. One that takes longer hangs; an engine that waits for
the job, since it needs the job's blocks, must not hang with it."""


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
        self._unclaimed: dict[int, tuple[EarlyWrite, int]] = {}
        self._reading: dict[int, tuple[EarlyWrite, int]] = {}
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
        with self._changed:
            io = self._io
            if io is None or not self._early:
                return None
            batch = EarlyWrite(job, io)
            writes = {page: (batch, i) for i, page in enumerate(job.host_pages)}
            self._unclaimed.update(writes)
            self._reading.update(writes)
        batch.future.add_done_callback(partial(self._ended, batch))
        return partial(self._start, batch, io)

    def persist(self, job: Job, on_part: OnPart) -> Persisting:
        """Answer a PERSIST job: from the early writes of its pages, and by writing those that have none. `on_part` as
        StorageIO has it.

        Where none has one it raises ClosedError (the storage I/O is closed, or there is none) or PageIdError (no such
        host page).
        """
        with self._changed:
            io = self._io
            found = {i: self._unclaimed.pop(page) for i, page in enumerate(job.host_pages) if page in self._unclaimed}
        found = {
            i: (batch, place)
            for i, (batch, place) in found.items()
            if batch.job.page_key(place) == job.page_key(i) and (io is None or batch.store is io)
        }
        if not found:
            return self._write(io, job, range(job.num_pages), on_part)
        gathered = GatheredPersist(job, partial(self._write, io, job), on_part, self._arena.layout.group.page_bytes)
        gathered.write([i for i in range(job.num_pages) if i not in found])
        batches: dict[EarlyWrite, dict[int, int]] = {}
        for i, (batch, place) in found.items():
            batches.setdefault(batch, {})[i] = place
        for batch, places in batches.items():
            gathered.take(batch, places)
        return Persisting(gathered.future, gathered.cancel)

    def make_way(self, job: Job) -> list[EarlyWrite]:
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
        with self._changed:
            held = {page for page, (batch, _) in self._reading.items() if batch in hung}
        return tuple(i for i, page in enumerate(job.host_pages) if page in held)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Block until no early write is under way; False when `timeout_s` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._reading, timeout_s)

    def detach(self, *, drain: bool) -> None:
        """Start no more early writes; without `drain` cancel those that storage has not begun. Those under way keep
        their pages as before, and answer PERSIST jobs that hold these pages meanwhile. Idempotent, never blocks."""
        with self._changed:
            self._io = None
            self._unclaimed = {page: e for page, e in self._unclaimed.items() if self._reading.get(page) == e}
            running = {batch for batch, _ in self._reading.values()}
        for batch in () if drain else running:
            batch.cancel()

    def _start(self, batch: EarlyWrite, io: StorageIO) -> None:
        if self._io is not io:
            batch.cancel()
        batch.start(lambda job: self._write(io, job, range(job.num_pages), partial(self._part_ended, batch)))
        if self._io is not io:  # meanwhile: `detach` may have come too early to cancel it
            batch.cancel()

    def _write(self, io: StorageIO | None, job: Job, indices: Sequence[int], on_part: OnPart) -> Persisting:
        """Hand pages of the job to storage, now."""
        if io is None:
            raise no_store(job)
        keys = [StorageKey(job.page_key(i), self._shard) for i in indices]
        future = io.persist(keys, [self._arena.page(job.host_pages[i]) for i in indices], on_part=on_part)
        return Persisting(future, partial(io.cancel, future))

    def _ended(self, batch: EarlyWrite, _: Future[PageOutcomes]) -> None:
        self._forget_reading(batch, batch.job.host_pages)

    def _part_ended(self, batch: EarlyWrite, part: PageOutcomes) -> None:
        pages = [page for page, reason in zip(batch.job.host_pages, part.reasons, strict=True) if reason != PENDING]
        self._forget_reading(batch, pages)
        batch.tell_part(part)

    def _forget_reading(self, batch: EarlyWrite, pages: Sequence[int]) -> None:
        with self._changed:
            for page in pages:
                if page in self._reading and self._reading[page][0] is batch:
                    del self._reading[page]
            self._changed.notify_all()


def no_store(job: Job) -> ClosedError:
    return ClosedError(f"a {job.kind} job needs a store, and none is attached")
