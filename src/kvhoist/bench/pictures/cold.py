"""The first transfer of a process: its phases, by what the kernel cache holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhoist.bench.pictures.parts import COLORS, TARGET

_PHASES = {"build_s": "build (maps, pins, compiles)", "first_offload_s": "offload", "first_load_s": "load"}


def draw(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw a result of `kvhoist.bench.cold`."""
    rows = result["results"]
    figure.set_size_inches(10, 2.2 + 0.7 * len(rows))
    axes = figure.subplots()
    begins = [0.0] * len(rows)
    for color, (field, name) in zip(COLORS, _PHASES.items(), strict=False):
        seconds = [row[field] for row in rows]
        axes.barh(range(len(rows)), seconds, left=begins, height=0.6, color=color, label=name)
        begins = [begin + length for begin, length in zip(begins, seconds, strict=True)]
    for place, end in enumerate(begins):
        axes.annotate(f" {end:.3g} s", (end, place), va="center", fontsize=9)
    warm = next(end for end, row in zip(begins, rows, strict=True) if row["arm"] == result["compared_with"])
    latest, target = warm + result["target_s"], result["target_s"]
    axes.axvline(latest, color=TARGET, linestyle="dashed", label=f"target: {target:g} s after a warm one")
    before = [f"{row['arm']}\n(start {row['start_s']:.2g} s, device {row['open_s']:.2g} s)" for row in rows]
    axes.set_yticks(range(len(rows)), before, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(latest, *begins))
    axes.set_xlabel(f"seconds to the end of the first load ({result['pages']} pages)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=4, fontsize=9)
