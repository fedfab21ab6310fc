"""Loads and offloads at once, beside two plain copies of as many bytes that cross the link at once."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

from kvhoist.bench.facts import facts
from kvhoist.bench.rig import Rig
from kvhoist.bench.shapes import HEADLINE, SMOKE, Shape
from kvhoist.bench.timing import Lead, Peak, make_timer
from kvhoist.copy.engine import CopyEngine
from kvhoist.platform.base import Device, Event, IdArray, Platform
from kvhoist.platform.open import open_platform

TARGET = 0.95
"""Share of the duplex peak, by events (design, numbers to beat)."""

_NUM_PAGES = 64
_LEADS = 6
"""Copies inside the device, 0.13 ms each on an H200, while the CPU enqueues both directions."""


Ids = tuple[IdArray, IdArray]

_SHAPES = (HEADLINE, Shape(False, 2048, 32), Shape(False, 1024, 32, 16), Shape(True, 576, 61))


def run(device: Device, *, smoke: bool = False, repeats: int = 11) -> dict[str, Any]:
    """Measure on `device` and return plain data. Raises ConfigError where there is no such device."""
    platform = open_platform(device)
    platform.enter_thread()
    shapes = (
        SMOKE[:1] if smoke else (HEADLINE, Shape(False, 2048, 32), Shape(False, 1024, 32, 16), Shape(True, 576, 61))
    )
    rows = [row for shape in shapes for row in _measure(platform, shape, 2 if smoke else repeats)]
    return {
        "bench": "duplex",
        "smoke": smoke,
        **facts(device),
        "peak": "two plain copies of the same numbers of bytes at once, one each way, in the same run",
        "targets": {"share_by_events": TARGET},
        "results": rows,
        "pass": all(row["pass"] for row in rows if row["engine"] == "staged"),
    }


def _measure(platform: Platform, shape: Shape, repeats: int) -> list[dict[str, Any]]:
    num_pages = 2 if not platform.capabilities.asynchronous else _NUM_PAGES
    with Rig(platform, shape.group, num_pages=2 * num_pages) as rig:
        up, down = rig.picked(num_pages), (rig.pages[num_pages:], rig.blocks[num_pages * shape.group.blocks_per_page :])
        names = [name for name in platform.capabilities.engines if name != "dma"]
        pairs = {name: tuple(rig.engine(name, loads=loads) for loads in (True, False)) for name in names}
        num_bytes = num_pages * shape.group.page_bytes
        peaks = [Peak(platform, rig.host.region.address + i * num_bytes, num_bytes) for i in range(2)]
        meter = _Meter(platform)
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in pairs}
        for repeat in range(repeats + 2):  # the first two warm up
            for name, (load, offload) in pairs.items():
                taken = (
                    meter.pair(load, up, offload, down),
                    meter.wall(load, up, offload, down),
                    meter.peak(*peaks),
                )
                found[name] += [taken] if repeat >= 2 else []
        return [_row(shape, name, 2 * num_bytes, times) for name, times in found.items()]


def _row(shape: Shape, engine: str, num_bytes: int, times: list[tuple[float, float, float]]) -> dict[str, Any]:
    events, wall, peak = (statistics.median(values) for values in zip(*times, strict=True))
    return {
        "shape": str(shape),
        "engine": engine,
        "mib_in_all": round(num_bytes / (1 << 20), 1),
        "peak_gib_s": round(num_bytes / peak / (1 << 30), 2),
        "gib_s": round(num_bytes / events / (1 << 30), 2),
        "share_by_events": round(peak / events, 3),
        "share_by_wall": round(peak / wall, 3),
        "pass": peak / events >= TARGET,
    }


class _Meter:
    """Times two copies that begin together, to the end of the later one."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._stream = platform.make_stream()
        self._timer = make_timer(platform)
        self._lead = Lead(platform)

    def pair(self, load: CopyEngine, up: Ids, offload: CopyEngine, down: Ids) -> float:
        """Return seconds by events, of copies that the CPU enqueued while the device did something else."""
        with self._platform.current():
            point = self._begin()
            ends: list[Event] = []
            for engine, ids in ((load, up), (offload, down)):
                for stream in engine.streams:
                    stream.wait(point)
                ends.append(engine.start(*ids, point).marks[-1][1])
            return self._end(ends)

    def peak(self, load: Peak, offload: Peak) -> float:
        with self._platform.current():
            point = self._begin()
            ends = []
            for one, upwards in ((load, True), (offload, False)):
                stream = one.streams[upwards]
                stream.wait(point)
                one.enqueue(stream, upwards=upwards)
                ends.append(self._platform.record(stream))
            return self._end(ends)

    def wall(self, load: CopyEngine, up: Ids, offload: CopyEngine, down: Ids) -> float:
        """Return seconds from the call to the end, each direction enqueued by a thread of its own, as in the mover."""

        def copy(engine: CopyEngine, ids: Ids) -> None:
            self._platform.enter_thread()
            ready.wait()
            engine.start(*ids, None).marks[-1][1].wait()

        ready = threading.Barrier(3)
        threads = [threading.Thread(target=copy, args=work) for work in ((load, up), (offload, down))]
        for thread in threads:
            thread.start()
        ready.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    def _begin(self) -> Event:
        for _ in range(_LEADS):
            self._lead.enqueue(self._stream)
        self._timer.start(self._stream)
        return self._platform.record(self._stream)

    def _end(self, ends: list[Event]) -> float:
        for end in ends:
            self._stream.wait(end)
        self._timer.stop(self._stream)
        return self._timer.seconds()
