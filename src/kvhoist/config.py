"""The options of a cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvhoist.checks import count, seconds
from kvhoist.control.eviction import EvictionFactory
from kvhoist.control.prefetch_policy import PrefetchPolicy, PrefetchWait
from kvhoist.errors import ConfigError, PolicyError
from kvhoist.units import parse_bytes

DEFAULT_STAGING_BYTES = 256 << 20
"""Measured on an H200: enough that the link never waits for a relayout kernel that queues behind a large GEMM."""

MAX_BLOCK_QUOTA = 1024
"""More than any GPU runs side by side."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The options of a `HierarchicalCache`; validated here or, for names, when the cache is built (PolicyError).

    write_policy: `write_through`, `write_through_selective` (after `min_hits` hits), `write_back` (owned device only).
    eviction: `lru`, `slru`, `lfu`, `arc`, or a function that makes a policy (`kvhoist.control.eviction`), of the
        host tier and of an owned device tier.
    device_owned: kvhoist gives out and evicts the device pages; False where the engine does.
    lookup_timeout_s: how long `match` waits for storage to say what it holds; 0 never waits.
    acquire_timeout_s: how long `acquire` waits for pages on their way; what is late is recomputed.
    prefetch_policy: how long it waits for pages from storage within that: `best_effort` (not at all), `wait_complete`,
        or `timeout`: `prefetch_timeout_s`, and `prefetch_timeout_per_page_s` for each page.
    host_retain: None keeps pages in the host tier until room is needed. 0 keeps none: a page goes as soon as storage
        has it and nobody uses it there, so that host memory only holds what is on its way.
    io_threads, max_queued_pages: the storage I/O pool and how many pages may wait to be persisted, beyond which they
        are dropped and counted; None is half of the host tier (waiting pages stay pinned there), at least 64.
    history_pages: how many evicted or failed pages `explain` remembers.
    io_backend: `auto`, or a copy engine by name.
    staging_bytes: device memory that copies on a GPU pass through, beside the engine's own tensors; less is taken where
        the host tier is small. Half of it is for loads, half for offloads, and a page must fit into a third of a half.
    block_quota: thread blocks (of 1,024 threads) that the `mapped` engine may take from the model beside it; None is
        the platform's number, 2 on NVIDIA GPUs and 16 on AMD's.
    debug_verify: compare each loaded page with what was offloaded (slow).
    store_secret: signs pages in storage with a keyed BLAKE2b; pages written without it are refused. None takes the
        environment's (KVHOIST_STORE_SECRET), if there is one.
    """

    write_policy: str = "write_through"
    min_hits: int = 2
    eviction: str | EvictionFactory = "lru"
    device_owned: bool = True
    lookup_timeout_s: float = 1.0
    acquire_timeout_s: float = 30.0
    prefetch_policy: str = "timeout"
    prefetch_timeout_s: float = 30.0
    prefetch_timeout_per_page_s: float = 0.0
    host_retain: int | None = None
    io_threads: int = 8
    max_queued_pages: int | None = None
    history_pages: int = 65536
    io_backend: str = "auto"
    staging_bytes: int | str = DEFAULT_STAGING_BYTES
    block_quota: int | None = None
    debug_verify: bool = False
    store_secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("lookup_timeout_s", "acquire_timeout_s"):
            if seconds(name, getattr(self, name)) > 86400:
                raise ConfigError(f"{name} is out of range", got=getattr(self, name), expected="at most 86400 seconds")
        check_host_retain(self.host_retain, self.prefetch_policy)
        self.prefetching()
        count("io_threads", self.io_threads, least=1, most=256)
        if self.max_queued_pages is not None:
            count("max_queued_pages", self.max_queued_pages, least=1, most=1 << 30)
        if self.block_quota is not None:
            count("block_quota", self.block_quota, least=1, most=MAX_BLOCK_QUOTA)
        count("history_pages", self.history_pages)
        object.__setattr__(self, "staging_bytes", parse_bytes(self.staging_bytes, name="staging_bytes"))
        for name in ("device_owned", "debug_verify"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is neither True nor False", got=repr(getattr(self, name)))
        if self.store_secret is not None and not isinstance(self.store_secret, bytes):
            raise ConfigError("store_secret is not bytes", got=type(self.store_secret).__name__, expected="bytes")

    def prefetching(self) -> PrefetchPolicy:
        """Return the prefetch policy. Raises PolicyError for an unknown name, ConfigError for times that cannot be."""
        return PrefetchPolicy.parse(self.prefetch_policy, self.prefetch_timeout_s, self.prefetch_timeout_per_page_s)


def check_host_retain(host_retain: int | None, prefetch_policy: str) -> None:
    """Raise ConfigError for a `host_retain` that cannot be, PolicyError for a prefetch policy that it makes useless."""
    if host_retain is not None and (isinstance(host_retain, bool) or host_retain != 0):
        raise ConfigError("host_retain is all or nothing", got=repr(host_retain), expected="None or 0")
    if host_retain == 0 and prefetch_policy == PrefetchWait.BEST_EFFORT:
        raise PolicyError(
            "best_effort brings pages for later requests, and host_retain=0 keeps none for them",
            choices=[PrefetchWait.TIMEOUT, PrefetchWait.WAIT_COMPLETE],
        )
