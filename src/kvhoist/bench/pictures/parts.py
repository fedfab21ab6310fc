"""What pictures share: colours, bars side by side with their values, targets as lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OURS, OTHER, THIRD, TARGET = "#1b9e77", "#bdbdbd", "#7570b3", "#d95f02"
COLORS = (OURS, THIRD, "#e6ab02", "#a6761d", "#66a61e")
"""One an arm, where none of them is the one to compare with."""


def tidy(axes: Any, values: str = "y") -> None:
    """Leave out the lines that frame nothing, and let faint ones guide the eye along the axis of the values."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=values, color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)


def grouped_bars(
    axes: Any, groups: Sequence[str], series: Mapping[str, Sequence[float]], colors: Sequence[str] = COLORS
) -> list[tuple[float, float]]:
    """Draw for each of `groups` one bar of each of `series` (a value a group), its value above it. Returns where on the
    x axis each group's bars begin and end."""
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        places = [group - 0.4 + (i + 0.5) * width for group in range(len(groups))]
        axes.bar(places, values, width * 0.95, label=name, color=colors[i % len(colors)])
        for place, value in zip(places, values, strict=True):
            axes.annotate(f"{value:,.3g}", (place, value), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(groups)), groups)
    tidy(axes)
    return [(group - 0.4, group + 0.4) for group in range(len(groups))]


def target_lines(axes: Any, spans: Sequence[tuple[float, float]], values: Sequence[float | None], label: str) -> None:
    """Draw a horizontal line at each value over its span of the x axis; none where a value is None."""
    for (left, right), value in zip(spans, values, strict=True):
        if value is not None:
            axes.hlines(value, left, right, colors=TARGET, linestyles="dashed", linewidth=1.5, label=label)
            label = "_nolegend_"


def legend(axes: Any) -> None:
    """Draw the legend below the axes, where it hides no value."""
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, fontsize=9)
