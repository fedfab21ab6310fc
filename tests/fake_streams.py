"""A platform with streams on the CPU: what is enqueued runs later, in another thread, only after what it waits for.

A missing wait therefore reads bytes that are not there yet. Device memory is host memory that the platform owns.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any

import numpy as np

from kvhoist.platform.base import CPU, ByteArray, Capabilities, Device, IdArray, MemoryRegion, Priority, Rects
from kvhoist.platform.cpu import host_view

GPU = Device("fake", 0)


class FakeEvent:
    """The number of a point in a stream; it has happened when the stream has come as far."""

    def __init__(self) -> None:
        self.point = threading.Event()
        self.point.set()

    def query(self) -> bool:
        return self.point.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.point.wait(timeout_s)


class FakeStream:
    """Work in order, each piece after a short random pause."""

    def __init__(self, priority: Priority, seed: int) -> None:
        self.priority = priority
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._random = random.Random(seed)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def wait(self, event: Any) -> None:
        point = event.point  # where the event is now: it may be recorded again
        self.enqueue(point.wait)

    def record(self, event: FakeEvent) -> None:
        event.point = threading.Event()
        self.enqueue(event.point.set)

    def synchronize(self) -> None:
        event = FakeEvent()
        self.record(event)
        assert event.wait(30)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            time.sleep(self._random.random() * 2e-4)
            work()


class FakeRegistration:
    def __init__(self, platform: FakePlatform, region: MemoryRegion) -> None:
        self.region = region
        self.device_address = region.address
        self._platform = platform
        platform.registered.append(region)

    def close(self) -> None:
        if self.region in self._platform.registered:
            self._platform.registered.remove(self.region)


class FakePlatform:
    """Copies only from and to memory that is registered or its own, and never over the end of a registration."""

    name = "fake"
    device = GPU
    capabilities = Capabilities(
        engines=("staged", "dma", "mapped"),
        asynchronous=True,
        host_visible=False,
        registers_host=True,
        launches_kernels=True,
        compute_capability=(9, 0),
        multiprocessors=4,
        max_pitch_bytes=1 << 20,
        block_quota=2,
    )

    def __init__(self, module: Any, device_regions: list[MemoryRegion]) -> None:
        self.registered: list[MemoryRegion] = []
        self.owned = list(device_regions)
        self._module = module
        self._seeds = iter(range(1000))

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def enter_thread(self) -> None:
        return

    def make_stream(self, priority: Priority = Priority.NORMAL) -> FakeStream:
        return FakeStream(priority, next(self._seeds))

    def make_event(self) -> FakeEvent:
        return FakeEvent()

    def record(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent()
        stream.record(event)
        return event

    def register(self, region: MemoryRegion) -> FakeRegistration:
        return FakeRegistration(self, region)

    def allocate(self, num_bytes: int) -> MemoryRegion:
        raw = np.zeros(num_bytes + 256, dtype=np.uint8)
        start = -raw.__array_interface__["data"][0] % 256
        memory = raw[start : start + num_bytes]
        memory[:] = 0xEE
        region = MemoryRegion(memory.__array_interface__["data"][0], num_bytes, GPU, raw)
        self.owned.append(region)
        return region

    def allocate_host(self, num_bytes: int) -> None:
        return

    def allocation_of(self, address: int) -> int:
        return next(region.address for region in self.owned if region.address <= address < region.end)

    def write(self, region: MemoryRegion, data: ByteArray) -> None:
        ctypes.memmove(region.address, data.__array_interface__["data"][0], data.nbytes)

    def view(self, region: MemoryRegion) -> ByteArray:
        assert region.device == CPU
        return host_view(region)

    def copy(self, source: int, destination: int, num_bytes: int, stream: FakeStream) -> None:
        for address in (source, destination):
            places = [*self.registered, *self.owned]
            allowed = any(place.address <= address and address + num_bytes <= place.end for place in places)
            assert allowed, "not the device's to touch"
        stream.enqueue(lambda: ctypes.memmove(destination, source, num_bytes))

    def copy_batch(self, sources: IdArray, destinations: IdArray, num_bytes: IdArray, stream: FakeStream) -> None:
        for source, destination, count in zip(sources.tolist(), destinations.tolist(), num_bytes.tolist(), strict=True):
            self.copy(source, destination, count, stream)

    def copy_batch_2d(self, rects: Rects, stream: FakeStream) -> None:
        for source, destination, width, height, *pitches in zip(*(field.tolist() for field in rects), strict=True):
            assert width <= min(pitches)
            assert max(pitches) <= self.capabilities.max_pitch_bytes
            for row in range(height):
                self.copy(source + row * pitches[0], destination + row * pitches[1], width, stream)

    def load_module(self, image: bytes) -> Any:
        return self._module
