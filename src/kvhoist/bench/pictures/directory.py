"""The directory: each figure as a share of its target, which is the most that is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhoist.bench.pictures.parts import OURS, TARGET, tidy


def draw(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw a result of `kvhoist.bench.directory`. Figures without a target are left out."""
    judged = [found for found in result["figures"] if found["target"] is not None]
    figure.set_size_inches(10, 1.6 + 0.42 * len(judged))
    axes = figure.subplots()
    shares = [found["value"] / found["target"] for found in judged]
    axes.barh(range(len(judged)), shares, color=OURS, height=0.65)
    for place, (found, share) in enumerate(zip(judged, shares, strict=True)):
        text = f" {found['value']:,.3g} {found['unit']}  (target {found['target']:g})"
        axes.annotate(text, (max(share, 1.0) + 0.01, place), va="center", fontsize=8)
    axes.axvline(1.0, color=TARGET, linestyle="dashed", label="target: at most this")
    axes.set_yticks(range(len(judged)), [found["name"].replace("_", " ") for found in judged])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.75 * max(1.0, *shares))
    axes.set_xlabel(f"share of the target ({result['num_pages']:,} pages)")
    tidy(axes, values="x")
    axes.legend(frameon=False, loc="lower right")
