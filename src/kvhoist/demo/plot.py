"""One picture of a demo: where each turn's tokens came from, and how soon the first new one did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvhoist.bench.plot import check_plot

if TYPE_CHECKING:
    from kvhoist.demo.session import Turn

_SOURCES = (
    ("device", "device_tokens", "#1b9e77"),
    ("host memory", "host_tokens", "#7570b3"),
    ("disk", "disk_tokens", "#e6ab02"),
    ("recomputed", "recomputed_tokens", "#d9d9d9"),
)


def plot_turns(turns: Sequence[Turn], restarted: Turn, path: Path, title: str) -> None:
    """Draw `turns` and the turn after the restart to `path`, in its suffix's format. Raises as `check_plot` does."""
    check_plot(path)
    from matplotlib.figure import Figure

    shown = [*turns, restarted]
    labels = [f"{turn.who} {turn.number}" for turn in turns] + [f"{restarted.who} {restarted.number}\nnew process"]
    places = range(len(shown))
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    bottom = [0] * len(shown)
    for name, field, color in _SOURCES:
        heights = [getattr(turn, field) for turn in shown]
        above.bar(places, heights, bottom=bottom, label=name, color=color, width=0.7)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    above.set_ylabel("prompt tokens")
    above.set_title(title)
    above.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False)
    width = 0.36
    with_it = [turn.ttft_seconds for turn in shown]
    without = [turn.ttft_without_seconds for turn in shown]
    below.bar([x - width / 2 for x in places], without, width, label="without kvhoist", color="#bdbdbd")
    below.bar([x + width / 2 for x in places], with_it, width, label="with kvhoist", color="#1b9e77")
    for x, turn in zip(places, shown, strict=True):
        if turn.speedup >= 1.5:
            below.annotate(f"{turn.speedup:.0f}x", (x + width / 2, turn.ttft_seconds), ha="center", va="bottom")
    below.set_ylabel("time to first token (s)")
    below.set_xticks(list(places), labels, rotation=30, ha="right")
    below.legend(frameon=False)
    figure.savefig(path, dpi=150)
