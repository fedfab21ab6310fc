"""The options of a cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvhoist.control.eviction import EvictionFactory
from kvhoist.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The options of a `HierarchicalCache`; validated here or, for names, when the cache is built (PolicyError).

    write_policy: `write_through`, `write_through_selective` (after `min_hits` hits), `write_back` (owned device only).
    eviction: `lru`, `slru`, `lfu`, `arc`, or a function that makes a policy (`kvhoist.control.eviction`), of the
        host tier and of an owned device tier.
    device_owned: kvhoist gives out and evicts the device pages; False where the engine does.
    lookup_timeout_s: how long `match` waits for storage to say what it holds; 0 never waits.
    acquire_timeout_s: how long `acquire` waits for pages on their way; what is late is recomputed.
    io_threads, max_queued_pages: the storage I/O pool and how many pages may wait to be persisted, beyond which they
        are dropped and counted; None is half of the host tier (waiting pages stay pinned there), at least 64.
    history_pages: how many evicted or failed pages `explain` remembers.
    io_backend: `auto`, or a copy engine by name.
    debug_verify: compare each loaded page with what was offloaded (slow).
    store_secret: signs pages in storage with a keyed BLAKE2b; pages written without it are refused.
    """

    write_policy: str = "write_through"
    min_hits: int = 2
    eviction: str | EvictionFactory = "lru"
    device_owned: bool = True
    lookup_timeout_s: float = 1.0
    acquire_timeout_s: float = 30.0
    io_threads: int = 4
    max_queued_pages: int | None = None
    history_pages: int = 65536
    io_backend: str = "auto"
    debug_verify: bool = False
    store_secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("lookup_timeout_s", "acquire_timeout_s"):
            value = getattr(self, name)
            if not 0 <= value <= 86400:
                raise ConfigError(f"{name} is out of range", got=value, expected="seconds from 0 to 86400")
        if self.max_queued_pages is not None and self.max_queued_pages < 1:
            raise ConfigError("max_queued_pages is out of range", got=self.max_queued_pages, expected="at least 1")
        if self.history_pages < 0:
            raise ConfigError("history_pages is out of range", got=self.history_pages, expected="0 or more")
