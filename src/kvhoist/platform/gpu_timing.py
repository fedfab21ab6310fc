"""Time between two points of a stream, by the device's own clock."""

from __future__ import annotations

from ctypes import byref, c_float, c_void_p

from kvhoist.platform.base import Stream
from kvhoist.platform.gpu import GpuPlatform
from kvhoist.platform.gpu_streams import GpuStream


class StreamTimer:
    """Two points; used again and again, and destroyed with this object."""

    def __init__(self, platform: GpuPlatform) -> None:
        self._driver = platform.driver
        self._points = [self._make(), self._make()]

    def start(self, stream: Stream) -> None:
        self._record(0, stream)

    def stop(self, stream: Stream) -> None:
        self._record(1, stream)

    def seconds(self) -> float:
        """Block until the second point has passed and return the time between them."""
        passed = c_float()
        with self._driver.current():
            self._driver.check(self._driver.call.event_synchronize(self._points[1]), "waiting for a timer")
            code = self._driver.call.event_elapsed(byref(passed), *map(c_void_p, self._points))
            self._driver.check(code, "reading a timer")
        return passed.value * 1e-3

    def _make(self) -> int:
        handle = c_void_p()
        with self._driver.current():
            self._driver.check(self._driver.call.event_create(byref(handle), 0), "making a timer")
        return int(handle.value or 0)

    def _record(self, which: int, stream: Stream) -> None:
        assert isinstance(stream, GpuStream)
        with self._driver.current():
            code = self._driver.call.event_record(self._points[which], stream.handle)
            self._driver.check(code, "recording a timer")

    def __del__(self) -> None:
        for point in getattr(self, "_points", ()):
            self._driver.call.event_destroy(point)
