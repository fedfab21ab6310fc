"""How much copies slow a model that computes beside them, and how fast the copies are then.

Windows of work with copies and without take turns. The floor is one plain pinned memcpy of the same number of bytes.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from kvhoist.bench.blobs import NAME as BLOBS
from kvhoist.bench.compute import Compute, make_computes
from kvhoist.bench.facts import facts
from kvhoist.bench.rig import Rig
from kvhoist.bench.shapes import HEADLINE, SMOKE, Shape
from kvhoist.bench.timing import Peak
from kvhoist.copy.engine import CopyEngine
from kvhoist.platform.base import Device, Event, Platform
from kvhoist.platform.open import open_platform

LINK_TARGET = 0.94
GEMM_TARGET = 0.01
GEMV_TARGET_ABOVE_FLOOR = 0.04
"""Design, numbers to beat: share of the link's peak beside compute, and by how much compute may be slower."""

_NUM_PAGES = 64
_IN_FLIGHT = 2
FLOOR = "one memcpy"

_Start = Callable[[], Event]


class _Arm(NamedTuple):
    name: str
    loads: bool
    start: _Start


def run(device: Device, *, smoke: bool = False, repeats: int = 5) -> dict[str, Any]:
    """Measure on `device` and return plain data. Raises ConfigError where there is no such device."""
    platform = open_platform(device)
    platform.enter_thread()
    computes = make_computes(platform)
    shapes = SMOKE[:1] if smoke else (HEADLINE, Shape(False, 1024, 32, 16))
    rows = [row for shape in shapes for row in _measure(platform, shape, computes, 2 if smoke else repeats)]
    return {
        "bench": "interference",
        "smoke": smoke,
        **facts(device),
        "peak": "one plain copy of the same number of bytes, in the same run, with nothing beside it",
        "targets": {
            "share_of_peak": LINK_TARGET,
            "GEMM slower by at most": GEMM_TARGET,
            "GEMV slower by at most": f"the floor's + {GEMV_TARGET_ABOVE_FLOOR}",
        },
        "results": rows,
        "pass": all(row["pass"] for row in rows if row["engine"] == "staged"),
    }


def _measure(platform: Platform, shape: Shape, computes: dict[str, Compute], repeats: int) -> list[dict[str, Any]]:
    num_pages = _NUM_PAGES if platform.capabilities.asynchronous else 2
    rows = []
    for one_allocation in (False, True):
        with Rig(platform, shape.group, num_pages=2 * num_pages, one_allocation=one_allocation) as rig:
            num_bytes = num_pages * shape.group.page_bytes
            peak = Peak(platform, rig.host.region.address, num_bytes)
            names = [n for n in (*platform.capabilities.engines, BLOBS) if (n == "dma") == one_allocation]
            arms = [_Arm(FLOOR, up, _memcpy(platform, peak, upwards=up)) for up in (True, False)]
            arms += [
                _Arm(name, up, _copy(rig.engine(name, loads=up), *rig.picked(num_pages)))
                for name in names
                for up in (True, False)
            ]
            for name, compute in computes.items():
                rows += _beside(shape, name, compute, arms if names else [], peak, repeats)
    return rows


def _memcpy(platform: Platform, peak: Peak, *, upwards: bool) -> _Start:
    def start() -> Event:
        stream = peak.streams[upwards]
        peak.enqueue(stream, upwards=upwards)
        return platform.record(stream)

    return start


def _copy(engine: CopyEngine, pages: Any, blocks: Any) -> _Start:
    return lambda: engine.start(pages, blocks, None).marks[-1][1]


def _beside(
    shape: Shape, work: str, compute: Compute, arms: list[_Arm], peak: Peak, repeats: int
) -> list[dict[str, Any]]:
    found: dict[tuple[str, bool], list[tuple[float, float, float, float]]] = {(a.name, a.loads): [] for a in arms}
    for repeat in range(repeats + 1):  # the first warms up
        for arm in arms:
            taken = (*_alone_and_beside(compute, arm.start), peak.once(upwards=arm.loads))
            found[arm.name, arm.loads] += [taken] if repeat else []
    rows: list[dict[str, Any]] = []
    for (name, loads), times in found.items():
        alone, beside, seconds, best = (statistics.median(values) for values in zip(*times, strict=True))
        slower = statistics.median(taken[1] / taken[0] for taken in times) - 1
        floor = next((row["slower"] for row in rows if row["engine"] == FLOOR and row["loads"] == loads), slower)
        most = GEMM_TARGET if work.startswith("GEMM") else floor + GEMV_TARGET_ABOVE_FLOOR
        rows.append(
            {
                "shape": str(shape),
                "beside": work,
                "engine": name,
                "loads": loads,
                "mib": round(peak.num_bytes / (1 << 20), 1),
                "alone_ms": round(alone * 1e3, 3),
                "beside_ms": round(beside * 1e3, 3),
                "slower": round(slower, 4),
                "slower_than_floor": round(slower - floor, 4),
                "gib_s": round(peak.num_bytes / seconds / (1 << 30), 2),
                "share_of_peak": round(best / seconds, 3),
                "pass": best / seconds >= LINK_TARGET and slower <= most,
            }
        )
    return rows


def _alone_and_beside(compute: Compute, start: _Start) -> tuple[float, float, float]:
    """Return the seconds of a window alone, of one beside copies, and of a copy. Windows come in the order alone,
    beside, beside, alone, after one that is not counted: a device that has worked for a while runs slower."""
    _alone(compute)
    alone = _alone(compute)
    windows = [_window(compute, start) for _ in range(2)]
    beside, copy = (sum(values) / 2 for values in zip(*windows, strict=True))
    return (alone + _alone(compute)) / 2, beside, copy


def _alone(compute: Compute) -> float:
    compute.start()
    return compute.seconds()


def _window(compute: Compute, start: _Start) -> tuple[float, float]:
    """Keep copies under way through a window of work. Return its seconds, and those of a copy in it."""
    under_way = deque(start() for _ in range(_IN_FLIGHT))
    under_way.popleft().wait()
    under_way.append(start())
    compute.start()
    began, ended, count = time.perf_counter(), 0.0, 0
    while not compute.done() or not count:
        under_way.popleft().wait()
        count += 1
        ended = time.perf_counter()
        under_way.append(start())
    seconds = compute.seconds()
    while under_way:
        under_way.popleft().wait()
    return seconds, (ended - began) / count
