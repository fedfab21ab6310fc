"""The cache's numbers at vLLM's own metrics endpoint and in its log."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvhoist.adapters.vllm.counts import GAUGES

_PREFIX = "vllm:kvhoist_"
"""vLLM takes its metrics out of the registry, for the next engine of a process, by their names."""

_COUNTERS = {
    "hit_tokens": ("tier", "Tokens loaded instead of computed, by the tier that held them (host, storage)."),
    "miss_tokens": ("reason", "Tokens of requests that no tier below the device brought, by reason."),
    "jobs": ("kind", "Finished jobs, by kind (offload, load, persist, prefetch, lookup)."),
    "pages": ("kind", "Pages moved, by kind of job; for lookups, pages found."),
    "failed_pages": ("kind", "Pages that a job could not move, by kind; for lookups, pages not found."),
    "bytes": ("kind", "Bytes moved, summed over ranks, by kind of job."),
    "seconds": ("kind", "Seconds from start to end of jobs on their slowest rank, summed, by kind of job."),
    "prefetch_pages": ("outcome", "Pages of prefetches: asked, hit, late, cancelled, useless."),
    "prefetch_bytes": ("outcome", "Bytes of these pages, summed over ranks."),
    "evicted_pages": (None, "Pages that left the host tier to make room."),
    "no_room_pages": (None, "Pages that found no room in the host tier: all of it was in use."),
    "mismatched_pages": (None, "Pages that debug_verify found to differ from what was offloaded."),
    "audit_failures": (None, "Audits of the cache's books that did not add up."),
}
_GAUGE_TEXTS = {
    "host_capacity_pages": "Pages that the host tier can hold.",
    "host_free_pages": "Pages of the host tier that hold nothing.",
    "host_ready_pages": "Pages of the host tier that can be loaded.",
    "host_filling_pages": "Pages of the host tier that are being filled.",
    "open_jobs": "Jobs under way.",
}


class CacheMetrics(KVConnectorStats):
    """Differences of counters and values of gauges, named `counter` or `counter.label`."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 6) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class CachePromMetrics(KVConnectorPromMetrics):
    """Registers `vllm:kvhoist_*` metrics with vLLM's registry, one series an engine and label."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: metric_types[Counter](
                name=f"{_PREFIX}{name}",
                documentation=text,
                labelnames=[*labelnames, *([label] if label else [])],
            )
            for name, (label, text) in _COUNTERS.items()
        }
        self._gauges = {
            name: metric_types[Gauge](name=f"{_PREFIX}{name}", documentation=_GAUGE_TEXTS[name], labelnames=labelnames)
            for name in GAUGES
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            metric, _, label = name.partition(".")
            if metric in self._gauges:
                self._gauges[metric].labels(*engine).set(value)
            else:
                self._counters[metric].labels(*engine, *([label] if label else [])).inc(value)
