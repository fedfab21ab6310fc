"""One picture of an acceptance run: what each arm's users waited for, and how much it served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvhoist.bench.plot import check_plot

_COLORS = {"none": "#bdbdbd", "native": "#7570b3", "kvhoist": "#1b9e77"}
_NAMES = {"none": "no offloading", "native": "vLLM's native\noffloading", "kvhoist": "kvhoist"}


def plot_acceptance(result: Mapping[str, Any], path: Path) -> None:
    """Draw the arms of `kvhoist.demo.vllm_acceptance.run`'s result to `path`, in its suffix's format.

    An arm that did not run keeps its place and says so. Raises as `check_plot` does.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    arms: Mapping[str, Any] = result["arms"]
    later = all(arm.get("ttft_later_turns_ms") for arm in arms.values() if "not_run" not in arm)
    ttft = ("ttft_later_turns_ms", "Time to first token, turns after the first (ms)")
    panels = (
        (*(ttft if later else ("ttft_ms", "Time to first token (ms)")), ("p50", "p99")),
        ("output_tokens_per_s", "Output tokens a second", ()),
        ("itl_ms", "Time between tokens (ms)", ("p50", "p99")),
    )
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    for axes, (name, title, parts) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        _draw(axes, arms, name, parts)
        axes.set_title(title, fontsize=10)
    settings, trace = result["settings"], result["trace"]
    figure.suptitle(
        f"{settings['model']}, {settings['clients']} clients, {trace['requests']} requests: {trace['source']}",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


def _draw(axes: Any, arms: Mapping[str, Any], name: str, parts: tuple[str, ...]) -> None:
    width = 0.8 / max(1, len(parts))
    highest = 0.0
    for place, (arm, found) in enumerate(arms.items()):
        if found.get(name) is None:
            axes.text(place, 0, " not run", ha="center", va="bottom", rotation=90, color="#666666")
            continue
        values = [found[name][part] for part in parts] if parts else [found[name]]
        for i, value in enumerate(values):
            at = place + (i - (len(values) - 1) / 2) * width
            axes.bar(at, value, width * 0.95, color=_COLORS[arm], alpha=1 - 0.45 * i, edgecolor="white")
            label = f"{parts[i]}\n{value:,.4g}" if parts else f"{value:,.4g}"
            axes.annotate(label, (at, value), ha="center", va="bottom", fontsize=8)
            highest = max(highest, value)
    axes.set_xticks(range(len(arms)), [_NAMES[arm] for arm in arms], fontsize=9)
    axes.set_xlim(-0.6, len(arms) - 0.4)
    axes.set_ylim(0, highest * 1.2 or 1)
    axes.spines[["top", "right"]].set_visible(False)
