"""Both planes bound in one process: jobs go from the outbox to the mover, completions come back under one lock."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from kvhoist.config import CacheConfig
from kvhoist.control.directory import Directory
from kvhoist.control.plane import ControlPlane
from kvhoist.control.policy import WritePolicy
from kvhoist.control.staging import check_staging
from kvhoist.control.tiers import Tier
from kvhoist.device_layout import DeviceCache
from kvhoist.engine_points import EnginePoints
from kvhoist.errors import ClosedError, ConfigError
from kvhoist.geometry import CacheGroup
from kvhoist.layout import Unit
from kvhoist.memory.arena import HostArena
from kvhoist.memory.pinned import touch_threads
from kvhoist.messages import Completion, Job
from kvhoist.mover import Mover
from kvhoist.platform.base import Event
from kvhoist.platform.open import open_platform
from kvhoist.stats import CacheStats, CloseReport, DetachReport
from kvhoist.storage.base import Store
from kvhoist.store_slot import StoreSlot
from kvhoist.transfer import Transfer

_log = logging.getLogger(__name__)


class Binding:
    """Owns the host arena, the mover, and the slot of the store.

    `lock` guards `plane` and `transfers` (the jobs under way, by id). Never wait for a transfer while holding it: the
    thread that finishes a job takes it to book the completion.
    """

    def __init__(
        self,
        group: CacheGroup,
        device: DeviceCache,
        host_bytes: int | str,
        store: Store | str | None,
        config: CacheConfig,
        engine_stream: Callable[[], int] | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.transfers: dict[int, Transfer] = {}
        self.num_device_blocks = device.layout.num_units
        self.num_device_pages = self.num_device_blocks // (
            group.blocks_per_page if device.layout.unit is Unit.BLOCK else 1
        )
        self._pid = os.getpid()
        self._report: CloseReport | None = None
        self._closing = False
        self.prefetching = config.prefetching()
        platform = open_platform(device.device)
        self.points = EnginePoints(platform, engine_stream, required=config.device_owned)
        policy = WritePolicy.parse(config.write_policy, min_hits=config.min_hits, device_owned=config.device_owned)
        with contextlib.ExitStack() as undo:
            self.arena = HostArena(
                group,
                host_bytes=host_bytes,
                first_touch_threads=touch_threads(platform),
                allocate=platform.allocate_host,
            )
            undo.callback(self.arena.close)
            capacities = {Tier.HOST: self.arena.num_pages}
            if config.device_owned:
                capacities[Tier.DEVICE] = self.num_device_pages
            directory = Directory(capacities, eviction=config.eviction, history_pages=config.history_pages)
            self.slot = StoreSlot(self.lock, self.arena, config, store)
            undo.callback(self.slot.close, timeout_s=30.0)
            attached = self.slot.current
            persists = attached is not None and attached.persists
            check_staging(config.host_retain, persists=persists)
            self.plane = ControlPlane(
                group,
                directory,
                policy,
                device_owned=config.device_owned,
                has_storage=attached is not None,
                persists=persists,
                host_retain=config.host_retain,
                clock=time.monotonic,
            )
            self.mover = Mover(
                group,
                device,
                self.arena,
                platform=platform,
                on_complete=self._book,
                io=None if attached is None else attached.io,
                io_backend=config.io_backend,
                staging_bytes=int(config.staging_bytes),
                block_quota=config.block_quota,
                debug_verify=config.debug_verify,
            )
            undo.pop_all()

    def check_open(self) -> None:
        """Raise ClosedError once closing has begun or in a forked child, ConfigError within a subscriber's call. With
        `lock` held."""
        if self.forked:
            raise ClosedError(
                "this cache belongs to the process that built it",
                got=f"a call in process {os.getpid()}, forked from {self._pid}",
                remedy="Build a cache in each process; they may share a store.",
            )
        self.check_caller()
        if self._closing:
            raise ClosedError("this cache is closed", remedy="Build a new one; the store keeps what was persisted.")

    @property
    def closing(self) -> bool:
        return self._closing

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that built the cache: none of its threads is here."""
        return os.getpid() != self._pid

    def check_caller(self) -> None:
        """Raise ConfigError when a subscriber calls, in the middle of a change of the directory. With `lock` held."""
        if self.plane.directory.telling:
            raise ConfigError(
                "a subscriber called the cache", remedy="Note the event, and act on it in another thread."
            )

    def attach_store(self, store: Store | str) -> None:
        self.slot.attach(store, self.plane, self.mover, self.check_open)

    def detach_store(self, *, drain: bool, timeout_s: float) -> DetachReport:
        return self.slot.detach(self.plane, self.mover, self.check_open, drain=drain, timeout_s=timeout_s)

    def dispatch(self, after: Event | None = None) -> dict[int, Transfer]:
        """Hand the outbox to the mover, with `lock` held, and return the transfers by job id. Copies begin after
        `after` and the engine's points. A job that the mover refuses is booked as failed."""
        if self.points.latest is not None:
            if after is not None:
                self.points.join(after)
            after = self.points.latest
        submitted: dict[int, Transfer] = {}
        while jobs := self.plane.take_jobs():
            for job in jobs:
                try:
                    transfer = self.mover.submit(job, after=after)
                except Exception as error:
                    self.plane.complete(Completion.failed(job, 0, f"{type(error).__name__}: {error}"))
                    continue
                submitted[job.id] = transfer
                if not transfer.done:
                    self.transfers[job.id] = transfer
        return submitted

    def cancel_deserted(self) -> None:
        """Cancel the prefetches that nobody waits for any more. Never with `lock` held."""
        with self.lock:
            deserted = self.plane.flights.take_cancels()
        for job_id in deserted:
            self.mover.cancel(job_id)

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; False where `timeout_s` passed first."""
        with self.lock:
            self.check_caller()
            self.dispatch()
        deadline = time.monotonic() + timeout_s
        idle = self.mover.wait_idle(timeout_s)
        return self.slot.wait_noted(max(0.0, deadline - time.monotonic())) and idle

    def wait(self, jobs: Sequence[Job | None], timeout_s: float) -> bool:
        """Wait for those of `jobs` still under way; False where `timeout_s` passed first. Never with `lock` held."""
        deadline = time.monotonic() + timeout_s
        with self.lock:
            transfers = [self.transfers[job.id] for job in jobs if job is not None and job.id in self.transfers]
        for transfer in transfers:
            try:
                transfer.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return False
        return True

    def stats(self) -> CacheStats:
        store = None if self._closing else self.slot.stats()
        with self.lock:
            attached = self.slot.current
            return CacheStats(
                jobs={kind.value: counters.to_dict() for kind, counters in self.plane.flights.counters.items()},
                directory=self.plane.directory.stats(),
                storage=None if attached is None else attached.io.stats(),
                store=store,
                store_state=self.slot.state,
                open_jobs=self.plane.tracker.num_open,
                num_mismatches=self.mover.num_mismatches,
                host_bytes=self.arena.num_bytes,
                page_bytes=self.plane.group.page_bytes,
                num_store_errors=self.slot.num_errors,
                prefetches=self.plane.prefetch_stats(),
            )

    def close(self, *, drain: bool, timeout_s: float) -> CloseReport:
        """Finish (or cancel) what is under way, book the rest as failed, release threads, memory and store."""
        if self.forked:
            return CloseReport(0, 0, True, 0.0)
        with self.lock:
            self.check_caller()
            if self._report is not None:
                return self._report
            self._closing = True
        started = time.monotonic()
        if drain and not self.flush(timeout_s):
            _log.warning("closing with jobs still under way after %.1f s", timeout_s)
        ended = self.mover.close(drain=False, timeout_s=max(1.0, started + timeout_s - time.monotonic()))
        ended = self.slot.close(timeout_s=max(1.0, started + timeout_s - time.monotonic())) and ended
        with self.lock:
            if ended:
                self.arena.close()
            unfinished = self.plane.tracker.jobs()
            pages = sum(self.plane.tracker.num_left(job.id) for job in unfinished)
            if self._report is None:  # unless another thread closed it meanwhile
                self._report = CloseReport(len(unfinished), pages, not ended, time.monotonic() - started)
            for job in unfinished:
                self.plane.complete(Completion.failed(job, 0, "the cache was closed first"))
            self.plane.take_jobs()
            self.plane.audit()
        return self._report

    def _book(self, completion: Completion) -> None:
        with self.lock:
            try:
                self.plane.complete(completion)
            finally:
                if not completion.pending_pages:
                    self.transfers.pop(completion.id, None)
                self.dispatch()
