"""The data plane of one rank: takes jobs, moves the bytes, answers each job exactly once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from kvhoist.config import DEFAULT_STAGING_BYTES
from kvhoist.copies import Copied, Copies, Finish, failed_with
from kvhoist.copy_lane import CopyLane
from kvhoist.device_copies import make_copies
from kvhoist.device_layout import DeviceCache
from kvhoist.early_persist import EarlyPersist, no_store
from kvhoist.errors import ClosedError
from kvhoist.geometry import CacheGroup
from kvhoist.memory.arena import HostArena
from kvhoist.messages import WHOLE, Completion, Job, JobKind, Shard
from kvhoist.platform.base import Event, Platform
from kvhoist.storage.io import StorageIO
from kvhoist.storage.outcomes import CANCELLED, PageOutcomes
from kvhoist.storage_jobs import answer_of, newly_arrived, start_storage_job
from kvhoist.transfer import Transfer

_log = logging.getLogger(__name__)

_HELD = "storage hangs in an earlier write of the same host pages"
_WRITES_TO_STORAGE = (JobKind.PERSIST, JobKind.DROP)


class Mover:
    """Moves pages for one cache group of one rank. Thread-safe.

    Loads and offloads run on a thread each, storage jobs on `io`'s threads; all of them sleep while there is nothing to
    do. `on_complete` is called once a job, in the thread that finished it (it may be one that submits or cancels) and
    before the transfer is done, so that whoever waits for the transfer sees the books up to date; it must not block on
    another transfer. `shard` names this rank's part of a page in storage; without `persists` (another rank holds the
    same part and writes it) PERSIST and DROP jobs are answered as done and nothing is written.

    With `early_persist` a page goes to storage once offloaded, which answers its later PERSIST job. A job that fills a
    host page which that write still reads cancels it or waits in the offload thread; if storage hangs the page fails.

    With `debug_verify` each page is hashed when it reaches the host tier; after a load it is read back from the device
    and compared, and a page that differs is a failed page (`num_mismatches` counts them).
    """

    def __init__(
        self,
        group: CacheGroup,
        device: DeviceCache,
        arena: HostArena,
        *,
        platform: Platform,
        on_complete: Callable[[Completion], object],
        io: StorageIO | None = None,
        rank: int = 0,
        shard: Shard = WHOLE,
        io_backend: str = "auto",
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        block_quota: int | None = None,
        debug_verify: bool = False,
        persists: bool = True,
        early_persist: bool = False,
    ) -> None:
        self.rank = rank
        self._group = group
        self._arena = arena
        self._io: StorageIO | None = None
        self._shard = shard
        self._persists = persists
        self._writes_early = early_persist and persists
        self._early = EarlyPersist(arena, shard)
        self._on_complete = on_complete
        self._copies: Copies | None = make_copies(
            device, arena, platform, io_backend, staging_bytes, block_quota=block_quota, debug_verify=debug_verify
        )
        self.plans = self._copies.plans
        self._asynchronous = platform.capabilities.asynchronous
        self._lock = threading.Lock()
        self._closed = False
        self.num_mismatches = 0
        self._open: dict[int, Transfer] = {}
        self._begun: set[int] = set()
        self._cancelled: set[int] = set()
        self._cancels: dict[int, Callable[[], bool]] = {}
        self._idle = threading.Condition(self._lock)
        if io is not None:
            self.attach(io)
        try:
            self._lanes = CopyLane.open_both(rank, platform, self._begin, self._end)
        except BaseException:
            self._copies.close()
            raise

    @property
    def num_open(self) -> int:
        """Jobs not yet answered."""
        return len(self._open)

    def submit(self, job: Job, *, after: Event | None = None) -> Transfer:
        """Start a job and return its transfer at once. The copy waits for `after` (the producer of an offload's source,
        the last reader of a load's destination). The job's pages and blocks belong to it until it is answered.

        Raises ClosedError after close, and for a storage job while no store is attached.
        """
        transfer = Transfer(job, self._group.layers if job.kind is JobKind.LOAD else ())
        nothing_to_do = job.kind in _WRITES_TO_STORAGE and not self._persists
        with self._lock:
            if self._closed:
                raise ClosedError("this mover is closed", got=f"a {job.kind} job")
            self._open[job.id] = transfer
        if nothing_to_do:
            self._answer(transfer, Completion(job.id, self.rank))
            return transfer
        try:
            if (lane := self._lane_of(job)) is not None:
                lane.put(transfer, after)
            else:
                self._submit_io(transfer)
        except BaseException:  # it was not taken: nobody will answer it
            self._forget(job.id)
            raise
        return transfer

    def attach(self, io: StorageIO, *, early: bool = True) -> None:
        """Serve storage jobs by `io` from now on; without `early`, as for a store only read, write no page early."""
        self._io = io
        self._early.attach(io, early=early and self._writes_early)

    def detach(self, *, drain: bool) -> None:
        """Refuse storage jobs from now on. Those under way are answered as their I/O ends them; early writes that have
        not begun are cancelled unless `drain`. Idempotent, never blocks."""
        self._io = None
        self._early.detach(drain=drain)

    def cancel(self, job_id: int) -> bool:
        """Cancel a job that has not begun: it is answered with all pages failed. False where it is too late."""
        with self._lock:
            cancel = self._cancels.get(job_id)
            if job_id not in self._open or job_id in self._begun:
                return False
            if cancel is None:
                self._cancelled.add(job_id)
                return True
        return cancel()

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Block until every job is answered and every early write has ended; False when `timeout_s` passed first."""
        started = time.monotonic()
        with self._idle:
            if not self._idle.wait_for(lambda: not self._open, timeout_s):
                return False
        return self._early.wait_idle(None if timeout_s is None else max(0.0, started + timeout_s - time.monotonic()))

    def close(self, *, drain: bool = True, timeout_s: float = 30.0) -> bool:
        """Stop taking jobs, finish what is queued (or cancel it, without `drain`) and end the threads.

        Returns whether every job was answered and every early write ended within `timeout_s`; of early writes, what has
        not begun by then is cancelled. Idempotent. Arena, device and store stay open; no view of the arena is kept.
        """
        with self._lock:
            self._closed = True
            open_ids = list(self._open)
        if not drain:
            for job_id in open_ids:
                self.cancel(job_id)
            self.detach(drain=False)
        ended = self.wait_idle(timeout_s)
        self.detach(drain=False)
        for lane in self._lanes.values():
            lane.close()
        left = [lane for lane in self._lanes.values() if not lane.join(timeout_s if ended else 0.1)]
        if not left and self._copies is not None:
            self._copies.close()
            self._copies = None
        return ended

    def _lane_of(self, job: Job) -> CopyLane | None:
        """Return the lane that must take the job, None where storage can take it now."""
        if job.kind in self._lanes:
            return self._lanes[job.kind]
        return self._lanes[JobKind.OFFLOAD] if self._early.make_way(job) else None

    def _begin(self, transfer: Transfer, after: Event | None) -> Finish | None:
        """Begin a copy, or hand a storage job over; returns what ends it."""
        transfer.started = time.monotonic()
        try:
            if transfer.job.kind not in self._lanes:
                self._submit_late(transfer)
                return None
            return self._copy(transfer, after)
        except BaseException as problem:
            return failed_with(problem)

    def _end(self, transfer: Transfer, finish: Finish) -> None:
        """Wait for a copy's end and answer its job, whatever happened: else its peers' pages hang."""
        job = transfer.job
        persist: Callable[[], None] | None = None
        try:
            num_bytes, failed, error = finish()
            if job.kind is JobKind.OFFLOAD and not failed:
                persist = self._early.announce(job)
            answer = Completion(job.id, self.rank, failed, error, num_bytes, time.monotonic() - transfer.started)
        except BaseException as problem:
            _log.exception("job %d (%s) failed", job.id, job.kind)
            answer = Completion.failed(job, self.rank, f"{type(problem).__name__}: {problem}")
        self._answer(transfer, answer, then=persist)

    def _copy(self, transfer: Transfer, after: Event | None) -> Finish:
        job = transfer.job
        with self._lock:
            cancelled = job.id in self._cancelled
            self._begun.add(job.id)
        if cancelled:
            return lambda: Copied(0, tuple(range(job.num_pages)), CANCELLED)
        if after is not None and not self._asynchronous:
            after.wait()
        copies = self._copies
        assert copies is not None, "threads end before the copies are given up"
        if job.kind is JobKind.LOAD:
            return partial(self._count_mismatches, copies.load(job, after, transfer))
        held = self._early.await_way(job)
        free = job if not held else job.without(held)
        if free is None:
            return lambda: Copied(0, held, _HELD)
        finish = copies.offload(free, after, transfer)
        return finish if not held else lambda: finish()._replace(failed_pages=held, error=_HELD)

    def _count_mismatches(self, finish: Finish) -> Copied:
        self.num_mismatches += len((copied := finish()).failed_pages)
        return copied

    def _submit_late(self, transfer: Transfer) -> None:
        """Hand a job to storage once early writes are out of its way."""
        job = transfer.job
        held = self._early.await_way(job)
        with self._lock:
            cancelled = job.id in self._cancelled
        if cancelled or held:
            self._answer(transfer, Completion.failed(job, self.rank, CANCELLED if cancelled else _HELD))
        else:
            self._submit_io(transfer)

    def _submit_io(self, transfer: Transfer) -> None:
        job, io = transfer.job, self._io
        on_part = lambda part: self._on_complete(self._told(transfer, part))  # noqa: E731
        if job.kind is JobKind.PERSIST and self._writes_early:
            future, cancel = self._early.persist(job, on_part)
        elif io is None:
            raise no_store(job)
        else:
            future = start_storage_job(io, self._arena, self._shard, job, on_part)
            cancel = partial(io.cancel, future)
        with self._lock:
            if job.id in self._open:
                self._cancels[job.id] = cancel
            cancelled = job.id in self._cancelled
        if cancelled:
            cancel()
        future.add_done_callback(lambda done: self._answer_io(transfer, done))

    def _answer_io(self, transfer: Transfer, future: Future[PageOutcomes]) -> None:
        try:
            if future.cancelled():
                answer = Completion.failed(transfer.job, self.rank, CANCELLED)
            else:
                answer = self._told(transfer, future.result())
        except BaseException as problem:  # as in _end: a rank must answer
            answer = Completion.failed(transfer.job, self.rank, f"{type(problem).__name__}: {problem}")
        self._answer(transfer, answer)

    def _told(self, transfer: Transfer, outcomes: PageOutcomes) -> Completion:
        """Return what storage tells of a job as its answer, once the copies know what has arrived."""
        with transfer.telling:  # a part and the whole may be told at once: neither before the copies know
            if self._copies is not None:
                self._copies.arrived(newly_arrived(transfer.job, transfer.told_pages, outcomes))
        return answer_of(transfer.job, self.rank, outcomes)

    def _answer(self, transfer: Transfer, answer: Completion, then: Callable[[], None] | None = None) -> None:
        try:
            self._on_complete(answer)
        except BaseException:  # whatever it raises, whoever waits must not wait for ever
            _log.exception("the completion of job %d could not be booked", answer.id)
        transfer.finish(answer)
        self._forget(answer.id)
        if then is not None:
            then()
        transfer.call_back()

    def _forget(self, job_id: int) -> None:
        with self._idle:
            self._open.pop(job_id, None)
            self._cancels.pop(job_id, None)
            self._begun.discard(job_id)
            self._cancelled.discard(job_id)
            self._idle.notify_all()
