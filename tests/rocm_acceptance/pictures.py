"""Pictures of an acceptance run, as images inside of the page; "" without matplotlib, or where nothing was measured."""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Mapping, Sequence
from typing import Any

from kvhoist.bench.pictures.parts import COLORS, OTHER, grouped_bars, legend, tidy
from rocm_acceptance.target import Row


def write_back(rows: Sequence[Row], published: Mapping[str, Any]) -> str:
    """Draw `staged` as measured and as published, by layers, a line a row length."""
    measured = [row for row in rows if row.get("staged_gib_s") is not None]
    kinds = list(dict.fromkeys(row["kind"] for row in measured))
    if not kinds or not _can_draw():
        return ""
    figure, every = _panels(len(kinds))
    for axes, kind in zip(every, kinds, strict=True):
        for i, (row_bytes, cells) in enumerate(published[kind].items()):
            points = [row for row in measured if (row["kind"], row["row_bytes"]) == (kind, int(row_bytes))]
            color = COLORS[i % len(COLORS)]
            axes.plot(
                [p["layers"] for p in points],
                [p["staged_gib_s"] for p in points],
                "o-",
                color=color,
                label=f"{row_bytes} B",
            )
            axes.plot([int(n) for n in cells], [figures[1] for figures in cells.values()], ":", color=color)
        axes.plot([], [], ":", color=OTHER, label=published["source"])
        axes.set_title(f"{kind}, staged")
        axes.set_xlabel("layers")
        axes.set_ylabel("GiB/s")
        axes.set_ylim(bottom=0)
        tidy(axes)
        legend(axes)
    return _image(figure, "write-back")


def loads(rows: Sequence[Row]) -> str:
    """Draw what the most pages reach by each engine and quota, a panel a cache."""
    measured = [row for row in rows if row.get("load_gib_s") is not None]
    if not measured or not _can_draw():
        return ""
    most = max(row["pages"] for row in measured)
    caches = list(dict.fromkeys(row["cache"] for row in measured))
    figure, every = _panels(len(caches))
    for axes, cache in zip(every, caches, strict=True):
        mine = [row for row in measured if (row["cache"], row["pages"]) == (cache, most)]
        names = [f"{row['engine']}\n{row['block_quota'] or ''}" for row in mine]
        grouped_bars(axes, names, {"load": [row["load_gib_s"] for row in mine]})
        axes.axhline(max(row["peak_gib_s"] for row in mine), color=OTHER, linestyle="dashed")
        axes.set_title(f"{cache}, {most} pages")
        axes.set_ylabel("GiB/s (dashed: one plain copy)")
    return _image(figure, "loads")


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _panels(count: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2 * count), layout="constrained")
    return figure, figure.subplots(count, 1, squeeze=False)[:, 0]


def _image(figure: Any, what: str) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return f'<p><img alt="{what}" src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"></p>'
