"""Both directions at once: the share of the duplex peak, by shape and engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhoist.bench.pictures.parts import grouped_bars, legend, target_lines


def draw(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw a result of `kvhoist.bench.duplex`."""
    rows = result["results"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    share = {(row["shape"], row["engine"]): row["share_by_events"] for row in rows}
    figure.set_size_inches(3 + 2.2 * len(shapes), 4.5)
    axes = figure.subplots()
    spans = grouped_bars(axes, shapes, {engine: [share[shape, engine] for shape in shapes] for engine in engines})
    target_lines(axes, spans, [result["targets"]["share_by_events"]] * len(shapes), "target")
    axes.set_ylabel("share of two plain copies at once, by events")
    legend(axes)
