"""Streams and events of a GPU, either vendor's."""

from __future__ import annotations

import time
import weakref
from ctypes import byref, c_void_p

from kvhoist.platform.base import Event, Priority
from kvhoist.platform.gpu_driver import EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING, GpuDriver

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 2e-3


class GpuEvent:
    """A point in a stream. Handles are used again when nobody holds the event any more."""

    handle = 0

    def __init__(self, driver: GpuDriver) -> None:
        self._driver = driver
        try:
            self.handle = driver.spare_events.pop()
        except IndexError:
            self.handle = self._create(driver)

    @staticmethod
    def _create(driver: GpuDriver) -> int:
        handle = c_void_p()
        with driver.current():
            code = driver.call.event_create(byref(handle), EVENT_DISABLE_TIMING | EVENT_BLOCKING_SYNC)
            driver.check(code, "making an event")
        return int(handle.value or 0)

    def __del__(self) -> None:
        if self.handle:
            self._driver.spare_events.append(self.handle)

    def query(self) -> bool:
        with self._driver.current():
            return self._driver.is_ready(self._driver.call.event_query(self.handle), "waiting for a copy")

    def wait(self, timeout_s: float | None = None) -> bool:
        if timeout_s is None:
            with self._driver.current():
                self._driver.check(self._driver.call.event_synchronize(self.handle), "waiting for a copy")
            return True
        deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while not self.query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True


class GpuStream:
    """A stream by its handle; destroyed with this object where it was made here."""

    def __init__(self, driver: GpuDriver, handle: int, priority: Priority, *, owned: bool) -> None:
        self._driver = driver
        self._wait, self._record = driver.call.stream_wait, driver.call.event_record
        self.handle = handle
        self.priority = priority
        if owned:
            weakref.finalize(self, driver.release, "stream_destroy", handle)

    def wait(self, event: Event) -> None:
        if not isinstance(event, GpuEvent):
            event.wait()
        elif code := self._wait(self.handle, event.handle, 0):
            self._driver.check(code, "letting a stream wait")

    def record(self, event: Event) -> None:
        assert isinstance(event, GpuEvent)
        if code := self._record(event.handle, self.handle):
            self._driver.check(code, "recording an event")

    def synchronize(self) -> None:
        with self._driver.current():
            self._driver.check(self._driver.call.stream_synchronize(self.handle), "waiting for a stream")
