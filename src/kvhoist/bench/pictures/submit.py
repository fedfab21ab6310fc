"""CPU time to begin a copy, by shape and direction, for each engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhoist.bench.pictures.parts import grouped_bars, legend, target_lines


def draw(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw a result of `kvhoist.bench.submit`, on a logarithmic scale."""
    rows = result["results"]
    names = list(dict.fromkeys((row["shape"], row["direction"]) for row in rows))
    arms = list(dict.fromkeys((row["engine"], row["layer_groups"]) for row in rows))
    us = {(row["shape"], row["direction"], row["engine"], row["layer_groups"]): row["us"] for row in rows}
    series = {
        f"{engine}, {groups} layer group(s)": [us.get((*name, engine, groups), 0.0) for name in names]
        for engine, groups in arms
    }
    figure.set_size_inches(3 + 1.8 * len(names), 5)
    axes = figure.subplots()
    spans = grouped_bars(axes, [f"{direction},\n{shape}" for shape, direction in names], series)
    target_lines(axes, spans, [result["targets"]["us"]] * len(names), "target")
    axes.set_yscale("log")
    axes.set_ylabel("us to begin a copy of 64 pages")
    legend(axes)
