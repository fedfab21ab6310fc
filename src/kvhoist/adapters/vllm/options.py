"""The settings that stand in vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvhoist.checks import count, seconds
from kvhoist.config import DEFAULT_STAGING_BYTES, MAX_BLOCK_QUOTA, check_host_retain
from kvhoist.control.eviction import eviction_factory
from kvhoist.control.policy import WritePolicy
from kvhoist.control.prefetch_policy import PrefetchPolicy
from kvhoist.control.staging import check_staging
from kvhoist.errors import ConfigError, PolicyError
from kvhoist.storage.open import is_read_only
from kvhoist.units import parse_bytes

_ON_ERROR = ("fail", "disable")
_NO_UNIT = 1024
"""Sizes below it were meant in another unit than bytes."""

_ELSEWHERE = {
    "block_size": "blocks_per_page (in blocks of vLLM)",
    "blocks_per_chunk": "blocks_per_page",
    "chunk_size": "blocks_per_page (in blocks of vLLM)",
    "cpu_bytes_to_use": "host_bytes",
    "cpu_bytes_to_use_per_rank": "host_bytes (of all ranks of the node together)",
    "eviction_policy": "eviction",
    "cache_policy": "eviction",
    "local_cpu": "host_retain (0 where it is false)",
    "max_local_cpu_size": "host_bytes (of all ranks of the node together)",
    "local_disk": "storage",
    "max_local_disk_size": 'storage, as "file:/path?capacity=..."',
    "disk_path": "storage",
    "use_layerwise": "layerwise",
    "store_threshold": "write_policy and min_hits",
}
"""What settings of other connectors are called here."""


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """What a user of vLLM can set; checked as a whole before anything is built.

    host_bytes: host memory for the cache on this node, divided over its ranks: `"64GiB"`, or bytes.
    storage: `"file:/path"`, or None for no third tier. All ranks of a node may share one folder.
    blocks_per_page: vLLM blocks in one page; None takes the least that holds 64 tokens.
    write_policy, min_hits: `write_through` offloads each full page, `write_through_selective` one that was used
        `min_hits` times more.
    eviction: `lru`, `slru`, `lfu` or `arc`, of the host tier.
    layerwise: load layer by layer inside of the forward, instead of before it; costs full CUDA graphs.
    weights_id, tenant: parts of the namespace: which weights these are (None: a fingerprint of the checkpoint), and
        whose pages.
    lookup_timeout_s: how long a request may wait for storage to say what it holds.
    host_retain: as in CacheConfig: 0 makes the host tier staging only.
    prefetch_policy, prefetch_timeout_s, prefetch_timeout_per_page_s: as in CacheConfig, how long it waits for pages.
    io_threads, max_queued_pages, history_pages, io_backend, staging_bytes, block_quota, debug_verify: as in
        CacheConfig, for each rank.
    on_error: what a problem at the start does: `fail` stops the engine, `disable` starts it without the cache.
    drain_timeout_s: how long a shutdown waits for pages on their way to storage; vLLM kills workers that take
        more than 5 seconds (VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS).
    """

    host_bytes: int
    storage: str | None = None
    blocks_per_page: int | None = None
    write_policy: str = "write_through"
    min_hits: int = 2
    eviction: str = "lru"
    layerwise: bool = False
    weights_id: str | None = None
    tenant: str = ""
    lookup_timeout_s: float = 1.0
    prefetch_policy: str = "timeout"
    prefetch_timeout_s: float = 30.0
    prefetch_timeout_per_page_s: float = 0.0
    host_retain: int | None = None
    io_threads: int = 8
    max_queued_pages: int | None = None
    history_pages: int = 65536
    io_backend: str = "auto"
    staging_bytes: int = DEFAULT_STAGING_BYTES
    block_quota: int | None = None
    debug_verify: bool = False
    on_error: str = "fail"
    drain_timeout_s: float = 3.0

    def __post_init__(self) -> None:
        for name in ("host_bytes", "staging_bytes"):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name=name))
        if self.host_bytes < _NO_UNIT:
            raise ConfigError(
                "host_bytes without a unit is in bytes",
                got=f"{self.host_bytes} B",
                remedy=f'Write "{self.host_bytes}GiB" if that is what you mean.',
            )
        for name in ("layerwise", "debug_verify"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is neither true nor false", got=repr(getattr(self, name)))
        for name in ("lookup_timeout_s", "prefetch_timeout_s", "prefetch_timeout_per_page_s", "drain_timeout_s"):
            object.__setattr__(self, name, seconds(name, getattr(self, name)))
        check_host_retain(self.host_retain, self.prefetch_policy)
        self.prefetching()
        for name in ("storage", "weights_id"):
            self._check_text(name, optional=True)
        for name in ("tenant", "io_backend", "eviction"):
            self._check_text(name, optional=False)
        limits = {"blocks_per_page": 1 << 16, "max_queued_pages": 1 << 30, "block_quota": MAX_BLOCK_QUOTA}
        for name, most in limits.items():
            if getattr(self, name) is not None:
                count(name, getattr(self, name), least=1, most=most)
        count("io_threads", self.io_threads, least=1, most=256)
        count("history_pages", self.history_pages)
        check_staging(self.host_retain, persists=self.persists)
        self.policy()
        eviction_factory(self.eviction)
        if self.on_error not in _ON_ERROR:
            raise PolicyError("no such on_error", got=repr(self.on_error), choices=_ON_ERROR)

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> ConnectorOptions:
        """Read `kv_connector_extra_config`. Raises ConfigError or PolicyError naming the setting."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in extra_config if name not in known]
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config has an unknown setting: {', '.join(map(str, unknown))}",
                choices=known,
                remedy=_remedy(str(unknown[0]), known),
            )
        if "host_bytes" not in extra_config:
            raise ConfigError(
                "kv_connector_extra_config lacks host_bytes",
                expected="the host memory that the cache may use on this node",
                remedy='For example "kv_connector_extra_config": {"host_bytes": "64GiB"}.',
            )
        return cls(**extra_config)

    @property
    def persists(self) -> bool:
        """Whether pages are written to storage, and not only read."""
        return self.storage is not None and not is_read_only(self.storage)

    def prefetching(self) -> PrefetchPolicy:
        return PrefetchPolicy.parse(self.prefetch_policy, self.prefetch_timeout_s, self.prefetch_timeout_per_page_s)

    def policy(self) -> WritePolicy:
        """Return the write policy; vLLM owns the device tier, so `write_back` is refused."""
        return WritePolicy.parse(self.write_policy, min_hits=self.min_hits, device_owned=False)

    def _check_text(self, name: str, *, optional: bool) -> None:
        value = getattr(self, name)
        if not (isinstance(value, str) or (optional and value is None)):
            raise ConfigError(f"{name} is no text", got=repr(value), expected="a string")


def _remedy(unknown: str, known: list[str]) -> str | None:
    if unknown in _ELSEWHERE:
        return f"Here it is {_ELSEWHERE[unknown]}; docs/engines.md has the others."
    near = difflib.get_close_matches(unknown, known, n=1)
    return f"Did you mean {near[0]!r}?" if near else None
