"""One picture of a benchmark's result. A new benchmark needs a `draw` in `bench/pictures`, and its line in PICTURES."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvhoist.bench.pictures import alloc, cold, copy, directory, duplex, interference, migration, storage, submit, ttft
from kvhoist.errors import ConfigError, MissingDependencyError

_SUFFIXES = (".png", ".svg", ".pdf")

PICTURES: Mapping[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "alloc": alloc.draw,
    "cold": cold.draw,
    "copy": copy.draw,
    "directory": directory.draw,
    "duplex": duplex.draw,
    "interference": interference.draw,
    "migration": migration.draw,
    "storage": storage.draw,
    "submit": submit.draw,
    "ttft": ttft.draw,
}
"""What draws a result on a matplotlib Figure, by the result's `bench`."""


def check_plot(path: Path) -> None:
    """Raise, before minutes of work, what drawing to `path` would raise: ConfigError for a path that cannot be drawn
    to, MissingDependencyError without matplotlib."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError("the folder of --plot is not there", got=str(folder))
    if path.suffix.lower() not in _SUFFIXES or path.is_dir():
        raise ConfigError("--plot is no picture's name", got=repr(str(path)), choices=[f"*{s}" for s in _SUFFIXES])
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("--plot needs matplotlib", remedy="Run: pip install 'kvhoist[bench]'.")


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw `result`, what the `run` of a benchmark in PICTURES returned, to `path`, in its suffix's format. Raises as
    `check_plot` does."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    PICTURES[result["bench"]](figure, result)
    figure.suptitle(title_of(result), fontsize=12)
    figure.savefig(path, dpi=150)


def title_of(result: Mapping[str, Any]) -> str:
    """Return what was measured, on what, and when."""
    machine = result["machine"]
    device = result["device"]["name"] if "device" in result else f"{machine['cpu']}, {machine['cpus']} cores"
    smoke = "; a smoke run: its figures mean nothing" if result["smoke"] else ""
    return f"kvhoist bench {result['bench']}: {device}, {result['date'][:10]}{smoke}"
