"""Page migration: how long iterations took in each arm, and for how long the driver evicted the queues."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvhoist.bench.pictures.parts import OTHER, OURS, grouped_bars, legend

_LATENCIES = {"median_ms": "median", "p99_ms": "p99", "worst_ms": "worst"}


def draw(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw a result of `kvhoist.bench.migration`."""
    rows = result["results"]
    figure.set_size_inches(10, 5)
    left, right = figure.subplots(1, 2, width_ratios=[3, 1])
    colors = (OTHER, OURS)
    latencies = {row["arm"]: [row[field] for field in _LATENCIES] for row in rows}
    grouped_bars(left, list(_LATENCIES.values()), latencies, colors)
    left.set_yscale("log")
    left.set_ylim(bottom=10 ** math.floor(math.log10(min(map(min, latencies.values())))))
    left.set_ylabel("ms")
    left.set_title("an iteration, while pages are migrated", fontsize=10)
    legend(left)
    grouped_bars(right, ["all attempts"], {row["arm"]: [row["evicted_ms"]] for row in rows}, colors)
    right.set_ylabel("ms")
    right.set_title("queues evicted", fontsize=10)
