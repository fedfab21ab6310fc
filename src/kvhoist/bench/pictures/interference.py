"""What copies cost compute beside them, and how fast they are then, by engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhoist.bench.pictures.parts import grouped_bars, legend, target_lines


def draw(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw a result of `kvhoist.bench.interference`: a row of panels for each kind of compute."""
    rows = result["results"]
    shape = rows[0]["shape"]
    rows = [row for row in rows if row["shape"] == shape]
    works = list(dict.fromkeys(row["beside"] for row in rows))
    figure.set_size_inches(13, 1 + 4 * len(works))
    for i, work in enumerate(works):
        mine = {(row["engine"], row["loads"]): row for row in rows if row["beside"] == work}
        engines = list(dict.fromkeys(engine for engine, _ in mine))
        for j, (field, label, scale) in enumerate(_PANELS):
            axes = figure.add_subplot(len(works), len(_PANELS), i * len(_PANELS) + j + 1)
            series = {
                name: [scale * mine[engine, loads][field] for engine in engines]
                for name, loads in (("load", True), ("offload", False))
            }
            spans = grouped_bars(axes, engines, series)
            if field == "share_of_peak":
                target_lines(axes, spans, [result["targets"][field]] * len(engines), "target")
            axes.set_title(f"beside {work}; {shape}", fontsize=9)
            axes.set_ylabel(label)
            legend(axes)


_PANELS = (
    ("slower", "compute slower by, %", 100.0),
    ("share_of_peak", "copies' share of the link's peak", 1.0),
)
