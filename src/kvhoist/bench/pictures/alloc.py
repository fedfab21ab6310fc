"""Host memory: how fast each arm makes it, by size, and how long giving it back takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhoist.bench.pictures.parts import OTHER, OURS, grouped_bars, legend, target_lines
from kvhoist.units import format_bytes


def draw(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw a result of `kvhoist.bench.alloc`."""
    ours, other = result["arms"]
    sizes = [row["bytes"] for row in result["ratios"]]
    rows = {(row["bytes"], row["arm"]): row for row in result["results"]}
    groups = [format_bytes(size) for size in sizes]
    figure.set_size_inches(10, 5)
    left, right = figure.subplots(1, 2)
    spans = grouped_bars(
        left, groups, {arm: [rows[size, arm]["gib_s"] for size in sizes] for arm in (other, ours)}, (OTHER, OURS)
    )
    least = [row["target"] and row["target"] * rows[row["bytes"], other]["gib_s"] for row in result["ratios"]]
    target_lines(left, spans, least, f"target: {result['target_ratio']:g} x {other}'s")
    left.set_ylabel("GiB/s")
    left.set_title("memory made", fontsize=10)
    legend(left)
    closing = {arm: [rows[size, arm]["close_s"] for size in sizes] for arm in (other, ours)}
    grouped_bars(right, groups, closing, (OTHER, OURS))
    right.set_ylabel("seconds")
    right.set_title("memory given back", fontsize=10)
