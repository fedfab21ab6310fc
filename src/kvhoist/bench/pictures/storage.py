"""Storage: what FileStore writes and reads a second beside fio, by page size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhoist.bench.pictures.parts import OTHER, OURS, THIRD, grouped_bars, legend, target_lines
from kvhoist.units import format_bytes

_FIO = "fio, the better depth"
_ARMS = {"store": "FileStore", "pool": "FileStore through its I/O threads"}


def draw(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw a result of `kvhoist.bench.storage`."""
    measured = [(size, way) for way in ("write", "read") for size in result["sizes"]]
    groups = [f"{way}, pages of {format_bytes(size['page_bytes'])}" for size, way in measured]
    rates = {name: [size[way]["gib_per_s"][arm] for size, way in measured] for arm, name in _ARMS.items()}
    fio = [[rate for arm, rate in size[way]["gib_per_s"].items() if arm not in _ARMS] for size, way in measured]
    compares = all(fio)
    if compares:
        rates = {_FIO: [max(depths) for depths in fio], **rates}
    figure.set_size_inches(10, 5.5)
    axes = figure.subplots()
    spans = grouped_bars(axes, groups, rates, (OTHER, THIRD, OURS) if compares else (THIRD, OURS))
    if compares:
        ratio = measured[0][0]["write"]["target_ratio"]
        target_lines(axes, spans, [ratio * rate for rate in rates[_FIO]], f"target: {ratio:g} of fio")
    axes.set_ylabel("GiB/s")
    reindex = result["reindex"]
    axes.set_title(
        f"{reindex['num_pages']:,} pages found again at start in {reindex['seconds']:g} s "
        f"(target {reindex['target_seconds']:g} s); disk: {result['disk']}",
        fontsize=10,
    )
    legend(axes)
