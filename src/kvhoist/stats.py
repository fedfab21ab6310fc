"""What a cache counted, as frozen data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvhoist.control.directory_stats import DirectoryStats
from kvhoist.control.plane import ControlPlane
from kvhoist.control.prefetches import PrefetchStats
from kvhoist.messages import JobKind
from kvhoist.storage.base import StoreStats
from kvhoist.storage.outcomes import StorageIOStats


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the cache was opened, gauges where the name says num_ or open_.

    jobs: by kind (`offload`, `load`, …) the jobs, pages, failed_pages, bytes and seconds of what finished.
    directory: pages and page states by tier, hits, evictions. storage and store: of the store that is attached, since
    then; None without one. store_state: which it is, or since when there is none, for people.
    num_store_errors: calls of the store outside of jobs (namespaces, stats, close) that raised.
    prefetches: what prefetches were good for, in pages.
    """

    jobs: Mapping[str, Mapping[str, float]]
    directory: DirectoryStats
    storage: StorageIOStats | None
    store: StoreStats | None
    prefetches: PrefetchStats
    open_jobs: int
    num_mismatches: int
    host_bytes: int
    page_bytes: int
    store_state: str
    num_store_errors: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DetachReport:
    """What detaching the store `store` came to: pages that were still written to it, pages whose writing was cancelled
    or failed, and pages that a call had in hand which had not returned. `memory_kept`: such calls keep their pages of
    the host tier, and the store stays open, until they return."""

    store: str
    persisted_pages: int
    lost_pages: int
    hung_pages: int
    memory_kept: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


class DetachTally:
    """Counts from now on for the report of detaching the store `store`. Called where the plane may be."""

    def __init__(self, store: str, plane: ControlPlane) -> None:
        self._store = store
        self._plane = plane
        self._persists = plane.flights.counters[JobKind.PERSIST]
        self._written, self._failed = self._persists.pages, self._persists.failed_pages
        self._started = time.monotonic()

    def report(self, memory_kept: bool) -> DetachReport:
        tracker = self._plane.tracker
        left = [job.id for job in tracker.jobs() if job.kind in (JobKind.PERSIST, JobKind.PREFETCH)]
        return DetachReport(
            self._store,
            persisted_pages=self._persists.pages - self._written,
            lost_pages=self._persists.failed_pages - self._failed,
            hung_pages=sum(map(tracker.num_left, left)) if memory_kept else 0,
            memory_kept=memory_kept,
            seconds=time.monotonic() - self._started,
        )


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What closing a cache came to: jobs that did not finish in time, and pages that were lost to the store by that.
    `memory_kept` is True where a hung store may still write into the host tier, which then stays mapped."""

    unfinished_jobs: int
    unfinished_pages: int
    memory_kept: bool
    seconds: float
