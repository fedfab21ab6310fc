"""What a cache counted, as frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvhoist.control.directory_stats import DirectoryStats
from kvhoist.control.prefetches import PrefetchStats
from kvhoist.storage.base import StoreStats
from kvhoist.storage.outcomes import StorageIOStats


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the cache was opened, gauges where the name says num_ or open_.

    jobs: by kind (`offload`, `load`, …) the jobs, pages, failed_pages, bytes and seconds of what finished.
    directory: pages and page states by tier, hits, evictions. storage and store: None without one.
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
    num_store_errors: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What closing a cache came to: jobs that did not finish in time, and pages that were lost to the store by that.
    `memory_kept` is True where a hung store may still write into the host tier, which then stays mapped."""

    unfinished_jobs: int
    unfinished_pages: int
    memory_kept: bool
    seconds: float
