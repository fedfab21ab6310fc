"""Time to first token by prefix length: recomputed, loaded whole, loaded layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhoist.bench.pictures.parts import grouped_bars, legend


def draw(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw a result of `kvhoist.bench.ttft`, on a logarithmic scale."""
    rows = result["results"]
    arms = {
        "recompute": "recompute",
        "load_whole": "load, then prefill the suffix",
        "load_layerwise": "load layer by layer under the prefill",
        "suffix_alone": "suffix alone, prefix on the device",
        "link": "the link alone",
    }
    figure.set_size_inches(3 + 2.4 * len(rows), 5)
    axes = figure.subplots()
    groups = [f"{row['prefix_tokens']:,} tokens" for row in rows]
    grouped_bars(axes, groups, {label: [row[f"{arm}_ms"] for row in rows] for arm, label in arms.items()})
    axes.set_yscale("log")
    axes.set_ylabel("ms to the first token")
    legend(axes)
