"""How long copies take: by the clock of the stream that waits for them, and by the wall's."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

from kvhoist.copy.engine import CopyEngine
from kvhoist.platform.base import IdArray, Platform, Priority, Stream
from kvhoist.platform.gpu import GpuPlatform
from kvhoist.platform.gpu_timing import StreamTimer

LEAD_BYTES = 256 << 20
"""Copied inside the device before what is timed: the CPU has enqueued that by then, and the L2 cache is cold. What
triton's do_bench does by zeroing as many bytes."""


class Timer(Protocol):
    """Time between two points of a stream."""

    def start(self, stream: Stream) -> None: ...

    def stop(self, stream: Stream) -> None: ...

    def seconds(self) -> float: ...


class _WallTimer:
    """For platforms whose work is done when its call returns."""

    def __init__(self) -> None:
        self._points = [0.0, 0.0]

    def start(self, stream: Stream) -> None:
        self._points[0] = time.perf_counter()

    def stop(self, stream: Stream) -> None:
        self._points[1] = time.perf_counter()

    def seconds(self) -> float:
        return self._points[1] - self._points[0]


def make_timer(platform: Platform) -> Timer:
    if not platform.capabilities.asynchronous:
        return _WallTimer()
    assert isinstance(platform, GpuPlatform)
    return StreamTimer(platform)


class Times(NamedTuple):
    """Seconds of one copy. `events`: between two points of a stream that had work before. The others in a stream that
    had none: `idle` between the two points, `wall` from the call to the copy's end, `submit` of the CPU."""

    events: float
    idle: float
    wall: float
    submit: float


class Arm:
    """One copy of given pages and blocks, timed from the point of view of an engine's stream."""

    def __init__(self, platform: Platform, engine: CopyEngine, lead: Lead, pages: IdArray, blocks: IdArray) -> None:
        self._platform, self._engine, self._ids = platform, engine, (pages, blocks)
        self._stream = platform.make_stream()
        self._timer = make_timer(platform)
        self._lead = lead

    def once(self) -> Times:
        events = self._behind_work()
        self._engine.synchronize()
        began = time.perf_counter()
        self._timer.start(self._stream)
        marks, _ = self._engine.start(*self._ids, self._platform.record(self._stream))
        submitted = time.perf_counter()
        self._stream.wait(marks[-1][1])
        self._timer.stop(self._stream)
        idle = self._timer.seconds()
        return Times(events, idle, time.perf_counter() - began, submitted - began)

    def _behind_work(self) -> float:
        with self._platform.current():
            self._lead.enqueue(self._stream)
            self._timer.start(self._stream)
            point = self._platform.record(self._stream)
            for stream in self._engine.streams:  # a load's link would not wait for the stream that its layers wait for
                stream.wait(point)
            marks, _ = self._engine.start(*self._ids, point)
            self._stream.wait(marks[-1][1])
            self._timer.stop(self._stream)
        return self._timer.seconds()


class Lead:
    """Work for a stream: a copy of `num_bytes` (default: LEAD_BYTES) inside the device; none where work is done when
    its call returns."""

    def __init__(self, platform: Platform, num_bytes: int | None = None) -> None:
        self._platform = platform
        self._num_bytes = (LEAD_BYTES if num_bytes is None else num_bytes) if platform.capabilities.asynchronous else 0
        self._memory = platform.allocate(max(1, 2 * self._num_bytes))

    def enqueue(self, stream: Stream) -> None:
        if self._num_bytes:
            address = self._memory.address
            self._platform.copy(address, address + self._num_bytes, self._num_bytes, stream)


class Peak:
    """Plain copies of up to `num_bytes` between pinned host memory and the device: what the link can do."""

    def __init__(self, platform: Platform, host_address: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._platform, self._host = platform, host_address
        self._flat = platform.allocate(num_bytes)
        self.streams = {up: platform.make_stream(Priority.HIGH) for up in (True, False)}
        self._timer = make_timer(platform)

    def once(self, *, upwards: bool, num_bytes: int | None = None) -> float:
        """Return the seconds of one copy to the device, or from it: of all, or of `num_bytes`."""
        stream = self.streams[upwards]
        with self._platform.current():
            self._timer.start(stream)
            self.enqueue(stream, upwards=upwards, num_bytes=num_bytes)
            self._timer.stop(stream)
        return self._timer.seconds()

    def enqueue(self, stream: Stream, *, upwards: bool, num_bytes: int | None = None) -> None:
        source, destination = (self._host, self._flat.address) if upwards else (self._flat.address, self._host)
        self._platform.copy(source, destination, self.num_bytes if num_bytes is None else num_bytes, stream)
