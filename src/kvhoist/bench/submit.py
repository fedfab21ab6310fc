"""What beginning a copy costs the CPU, by every engine and by the one that is chosen."""

from __future__ import annotations

import statistics
import time
from typing import Any

from kvhoist.bench.facts import facts
from kvhoist.bench.rig import Rig
from kvhoist.bench.shapes import HEADLINE, SMOKE, Shape
from kvhoist.copy.engine import CopyEngine
from kvhoist.platform.base import Device, IdArray, Platform
from kvhoist.platform.open import open_platform

TARGET_US, AIM_US = 400, 200
"""Design, numbers to beat: 64 pages of 32 layers of K and V."""

_NUM_PAGES = 64
_SHAPES = (Shape(False, 512, 32), HEADLINE, Shape(False, 2048, 32), Shape(False, 1024, 32, 16))


def run(device: Device, *, smoke: bool = False, repeats: int = 25) -> dict[str, Any]:
    """Measure on `device` and return plain data. Raises ConfigError where there is no such device."""
    platform = open_platform(device)
    platform.enter_thread()
    shapes = SMOKE[:1] if smoke else _SHAPES
    rows = [row for shape in shapes for row in _measure(platform, shape, 3 if smoke else repeats)]
    return {
        "bench": "submit",
        "smoke": smoke,
        **facts(device),
        "targets": {"us": TARGET_US, "aim_us": AIM_US},
        "results": rows,
        "pass": all(row["pass"] for row in rows if row["chosen"]),
    }


def _measure(platform: Platform, shape: Shape, repeats: int) -> list[dict[str, Any]]:
    num_pages = _NUM_PAGES if platform.capabilities.asynchronous else 2
    rows = []
    with Rig(platform, shape.group, num_pages=2 * num_pages) as rig:
        for loads in (False, True):
            choice = rig.choice(num_pages, loads=loads)
            found = {(name, 1) for name in platform.capabilities.engines} | {(choice.engine, choice.num_groups)}
            for name, num_groups in sorted(found):
                engine = rig.engine(name, loads=loads, num_groups=num_groups)
                wall, cpu = _times(engine, *rig.picked(num_pages), repeats)
                rows.append(
                    {
                        "shape": str(shape),
                        "direction": "load" if loads else "offload",
                        "engine": name,
                        "layer_groups": num_groups,
                        "chosen": (name, num_groups) == (choice.engine, choice.num_groups),
                        "us": round(wall * 1e6, 1),
                        "cpu_us": round(cpu * 1e6, 1),
                        "pass": wall * 1e6 <= TARGET_US,
                    }
                )
    return rows


def _times(engine: CopyEngine, pages: IdArray, blocks: IdArray, repeats: int) -> tuple[float, float]:
    """Return medians of wall and thread CPU seconds of `start`."""
    found = []
    for _ in range(repeats + 2):  # the first two warm up
        engine.synchronize()
        wall, cpu = time.perf_counter(), time.thread_time()
        engine.start(pages, blocks, None)
        found.append((time.perf_counter() - wall, time.thread_time() - cpu))
    engine.synchronize()
    walls, cpus = zip(*found[2:], strict=True)
    return statistics.median(walls), statistics.median(cpus)
