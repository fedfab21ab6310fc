"""Storage: what FileStore writes and reads a second beside plain I/O, by page size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhoist.bench.pictures.parts import OTHER, OURS, THIRD, grouped_bars, legend, target_lines
from kvhoist.units import format_bytes

_ARMS = {"plain": "plain sequential I/O", "store": "FileStore", "pool": "FileStore through its I/O threads"}


def draw(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw a result of `kvhoist.bench.storage`."""
    measured = [(size, way) for way in ("write", "read") for size in result["sizes"]]
    groups = [f"{way}, pages of {format_bytes(size['page_bytes'])}" for size, way in measured]
    rates = {name: [size[way]["gib_per_s"][arm] for size, way in measured] for arm, name in _ARMS.items()}
    figure.set_size_inches(10, 5.5)
    axes = figure.subplots()
    spans = grouped_bars(axes, groups, rates, (OTHER, THIRD, OURS))
    ratio = measured[0][0]["write"]["target_ratio"]
    least = [size[way]["target_ratio"] * size[way]["gib_per_s"]["plain"] for size, way in measured]
    target_lines(axes, spans, least, f"target: {ratio:g} of plain I/O")
    axes.set_ylabel("GiB/s")
    reindex = result["reindex"]
    axes.set_title(
        f"{reindex['num_pages']:,} pages found again at start in {reindex['seconds']:g} s "
        f"(target {reindex['target_seconds']:g} s); disk: {result['disk']}",
        fontsize=10,
    )
    legend(axes)
