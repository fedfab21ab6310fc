"""The data plane of one rank: takes jobs, moves the bytes, answers each job exactly once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from kvhoist.copies import Copies
from kvhoist.device_layout import DeviceCache
from kvhoist.errors import ClosedError, ConfigError
from kvhoist.geometry import CacheGroup
from kvhoist.memory.arena import HostArena
from kvhoist.messages import WHOLE, Completion, Job, JobKind, Shard, StorageKey
from kvhoist.platform.base import Event, Platform
from kvhoist.storage.io import StorageIO
from kvhoist.storage.outcomes import PageOutcomes
from kvhoist.transfer import Transfer

_log = logging.getLogger(__name__)


class Mover:
    """Moves pages for one cache group of one rank. Thread-safe.

    Loads and offloads run on a thread each, storage jobs on `io`'s threads; all of them sleep while there is nothing to
    do. `on_complete` is called once a job, in the thread that finished it and before the transfer is done, so that
    whoever waits for the transfer sees the books up to date; it must not block on another transfer. `shard` names this
    rank's part of a page in storage.

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
        debug_verify: bool = False,
    ) -> None:
        self.rank = rank
        self._group = group
        self._arena = arena
        self._io = io
        self._shard = shard
        self._on_complete = on_complete
        self._copies: Copies | None = Copies(device, arena, platform, io_backend, debug_verify=debug_verify)
        self.plans = self._copies.plans
        self._lock = threading.Lock()
        self._closed = False
        self._num_mismatches = 0
        self._open: dict[int, Transfer] = {}
        self._begun: set[int] = set()
        self._cancelled: set[int] = set()
        self._futures: dict[int, Future[PageOutcomes]] = {}
        self._idle = threading.Condition(self._lock)
        self._queues: dict[JobKind, SimpleQueue[tuple[Transfer, Event | None] | None]] = {
            JobKind.LOAD: SimpleQueue(),
            JobKind.OFFLOAD: SimpleQueue(),
        }
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"kvhoist-{kind}-{rank}", daemon=True)
            for kind, queue in self._queues.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_open(self) -> int:
        """Jobs not yet answered."""
        return len(self._open)

    @property
    def num_mismatches(self) -> int:
        """Pages that `debug_verify` found to differ from what was offloaded."""
        return self._num_mismatches

    def submit(self, job: Job, *, after: Event | None = None) -> Transfer:
        """Start a job and return its transfer at once. The copy waits for `after` (the producer of an offload's source,
        the last reader of a load's destination). The job's pages and blocks belong to it until it is answered.

        Raises ClosedError after close, ConfigError for a storage job without storage.
        """
        transfer = Transfer(job, self._group.layers if job.kind is JobKind.LOAD else ())
        with self._lock:
            if self._closed:
                raise ClosedError("this mover is closed", got=f"a {job.kind} job")
            if job.kind not in self._queues and self._io is None:
                raise ConfigError(f"a {job.kind} job needs a store", remedy="Attach one when the cache is built.")
            self._open[job.id] = transfer
        if job.kind in self._queues:
            self._queues[job.kind].put((transfer, after))
            return transfer
        try:
            self._submit_io(transfer)
        except BaseException:  # it was not taken: nobody will answer it
            self._forget(job.id)
            raise
        return transfer

    def cancel(self, job_id: int) -> bool:
        """Cancel a job that has not begun: it is answered with all pages failed. False where it is too late."""
        with self._lock:
            future = self._futures.get(job_id)
            if job_id not in self._open or job_id in self._begun:
                return False
            if future is None:
                self._cancelled.add(job_id)
                return True
        return self._io is not None and self._io.cancel(future)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Block until every job is answered; False when `timeout_s` passed first."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._open, timeout_s)

    def close(self, *, drain: bool = True, timeout_s: float = 30.0) -> bool:
        """Stop taking jobs, finish what is queued (or cancel it, without `drain`) and end the threads.

        Returns whether every job was answered within `timeout_s`. Idempotent. Arena, device and store
        stay open; no view of the arena is kept.
        """
        with self._lock:
            self._closed = True
            open_ids = list(self._open)
        if not drain:
            for job_id in open_ids:
                self.cancel(job_id)
        answered = self.wait_idle(timeout_s)
        for queue in self._queues.values():
            queue.put(None)
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(timeout_s if answered else 0.1)
        if not any(thread.is_alive() for thread in others):
            self._copies = None
        return answered

    def _work(self, queue: SimpleQueue[tuple[Transfer, Event | None] | None]) -> None:
        while (work := queue.get()) is not None:
            transfer, after = work
            started = time.monotonic()
            try:
                failed, error = self._copy(transfer, after)
            except BaseException as problem:  # a rank must answer whatever happened, or its peers' pages hang
                _log.exception("job %d (%s) failed", transfer.job.id, transfer.job.kind)
                failed, error = tuple(range(transfer.job.num_pages)), f"{type(problem).__name__}: {problem}"
            moved = (transfer.job.num_pages - len(failed)) * self._group.page_bytes
            seconds = time.monotonic() - started
            self._answer(transfer, Completion(transfer.job.id, self.rank, failed, error, moved, seconds))

    def _copy(self, transfer: Transfer, after: Event | None) -> tuple[tuple[int, ...], str | None]:
        job = transfer.job
        with self._lock:
            cancelled = job.id in self._cancelled
            self._begun.add(job.id)
        if cancelled:
            return tuple(range(job.num_pages)), "cancelled before it began"
        if after is not None:
            after.wait()
        copies = self._copies
        assert copies is not None, "threads end before the copies are given up"
        if job.kind is JobKind.OFFLOAD:
            copies.offload(job)
            return (), None
        wrong = copies.load(job, transfer.arrive)
        self._num_mismatches += len(wrong)
        return wrong, "debug_verify: the device does not hold what was offloaded" if wrong else None

    def _submit_io(self, transfer: Transfer) -> None:
        assert self._io is not None
        job = transfer.job
        keys = [StorageKey(job.page_key(i), self._shard) for i in range(job.num_pages)]
        blobs = [self._arena.page(page) for page in job.host_pages]
        if job.kind is JobKind.PERSIST:
            future = self._io.persist(keys, blobs)
        elif job.kind is JobKind.PREFETCH:
            future = self._io.prefetch(keys, blobs)
        elif job.kind is JobKind.LOOKUP:
            future = self._io.lookup(keys)
        else:
            future = self._io.drop(keys)
        with self._lock:
            if job.id in self._open:
                self._futures[job.id] = future
            cancelled = job.id in self._cancelled
        if cancelled:
            self._io.cancel(future)
        future.add_done_callback(lambda done: self._answer_io(transfer, done))

    def _answer_io(self, transfer: Transfer, future: Future[PageOutcomes]) -> None:
        job = transfer.job
        everything = tuple(range(job.num_pages))
        try:
            if future.cancelled():
                answer = Completion(job.id, self.rank, everything, "cancelled before it began")
            else:
                done = future.result()
                answer = Completion(job.id, self.rank, done.failed_pages, done.error, done.bytes, done.seconds)
                copies = self._copies
                if job.kind is JobKind.PREFETCH and copies is not None:
                    failed = set(done.failed_pages)
                    copies.arrived([page for i, page in enumerate(job.host_pages) if i not in failed])
        except BaseException as problem:  # as in _work: a rank must answer
            answer = Completion(job.id, self.rank, everything, f"{type(problem).__name__}: {problem}")
        self._answer(transfer, answer)

    def _answer(self, transfer: Transfer, answer: Completion) -> None:
        try:
            self._on_complete(answer)
        except BaseException:  # whatever it raises, whoever waits must not wait for ever
            _log.exception("the completion of job %d could not be booked", answer.id)
        transfer.finish(answer)
        self._forget(answer.id)
        transfer.call_back()

    def _forget(self, job_id: int) -> None:
        with self._idle:
            self._open.pop(job_id, None)
            self._futures.pop(job_id, None)
            self._begun.discard(job_id)
            self._cancelled.discard(job_id)
            self._idle.notify_all()
