"""Copies: which share of the peak each shape reaches, by arm, beside the targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvhoist.bench.pictures.parts import COLORS, TARGET, tidy

_DASHES = ("dashed", "dotted", "dashdot")
_CLOCKS = {"events": "share of the link's peak,\nby events", "wall": "share of the link's peak,\nby the wall clock"}


def draw(figure: Any, result: Mapping[str, Any]) -> None:
    """Draw a result of `kvhoist.bench.copy`, or, where it has a GPU, what `auto` chooses of one of
    `kvhoist.bench.copy_device`."""
    rows = result["results"]
    if "device" in result:
        most = max(row["pages"] for row in rows)
        rows = sorted((row for row in rows if row["chosen"] and row["pages"] == most), key=lambda row: row["mib"])
        panels = {label: f"share_by_{clock}" for clock, label in _CLOCKS.items()}
        targets = [{name: bars[clock] for name, bars in result["targets"].items()} for clock in _CLOCKS]
        names, arm = [f"{row['shape']}, {row['mib']:,} MiB" for row in rows], "arm"
    else:
        panels = {"share of numpy's own copy": "share_of_peak"}
        targets = [{"": result["target_share_of_peak"]}]
        names, arm = [f"{row['shape']}, {row['bytes'] >> 20:,} MiB" for row in rows], "direction"
    shapes = list(dict.fromkeys(names))
    figure.set_size_inches(max(7.0, 2 + 0.28 * len(shapes)), 3.2 + 3 * len(panels))
    every = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, field), bars in zip(every, panels.items(), targets, strict=True):
        _shares(axes, shapes, names, rows, (arm, field))
        _targets(axes, bars)
        axes.set_ylabel(label)
    every[-1].set_xticks(range(len(shapes)), shapes, rotation=90, fontsize=8)
    every[0].legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=9)


def _shares(
    axes: Any, shapes: Sequence[str], names: Sequence[str], rows: Sequence[Mapping[str, Any]], fields: tuple[str, str]
) -> None:
    """Draw a point a row, at its shape's place, in its arm's colour."""
    arm_field, share_field = fields
    for i, arm in enumerate(dict.fromkeys(row[arm_field] for row in rows)):
        mine = [(shapes.index(name), row) for name, row in zip(names, rows, strict=True) if row[arm_field] == arm]
        places, shares = [place for place, _ in mine], [row[share_field] for _, row in mine]
        axes.plot(places, shares, "osD^v"[i % 5], color=COLORS[i % len(COLORS)], markersize=5, label=arm)
    tidy(axes)
    axes.grid(axis="x", color="#f0f0f0", linewidth=0.6)
    axes.set_xlim(-0.7, len(shapes) - 0.3)


def _targets(axes: Any, targets: Mapping[str, float]) -> None:
    for i, (name, target) in enumerate(targets.items()):
        label = f"target {name}".rstrip()  # its number stands at the line's end
        axes.axhline(target, color=TARGET, linestyle=_DASHES[i % len(_DASHES)], linewidth=1.2, label=label)
        axes.annotate(f"{target:g}", (1.003, target), xycoords=("axes fraction", "data"), fontsize=8, va="center")
