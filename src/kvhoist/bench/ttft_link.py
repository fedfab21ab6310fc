"""The least time that bytes need to a device: one plain copy of as many, from pinned memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np

from kvhoist.geometry import CacheGroup
from kvhoist.memory.arena import HostArena
from kvhoist.memory.pinned import PinnedArena, touch_threads
from kvhoist.platform.base import CPU, Device, MemoryRegion, Priority
from kvhoist.platform.cuda import CudaPlatform
from kvhoist.platform.cuda_timing import StreamTimer

Link: TypeAlias = Callable[[int], float]
"""Copies so many bytes to the device, waits, and returns the seconds that it took."""


@contextmanager
def open_link(device: Device, group: CacheGroup, num_pages: int) -> Iterator[Link]:
    """Give the link to `device` with room for `num_pages` pages on both ends. Raises ConfigError where there is no such
    device, HostMemoryError and DeviceError where there is no room."""
    if device == CPU:
        yield _numpy_link(num_pages * group.page_bytes)
        return
    platform = CudaPlatform(device)
    arena = HostArena(group, num_pages=num_pages, first_touch_threads=touch_threads(platform))
    try:
        # In one piece: a copy must not span two registrations.
        with PinnedArena(arena, platform, piece_bytes=arena.num_bytes) as pinned:
            yield _cuda_link(platform, pinned.region)
    finally:
        arena.close()


def _numpy_link(num_bytes: int) -> Link:
    source, destination = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)

    def seconds(num_bytes: int) -> float:
        began = time.perf_counter()
        np.copyto(destination[:num_bytes], source[:num_bytes])
        return time.perf_counter() - began

    return seconds


def _cuda_link(platform: CudaPlatform, host: MemoryRegion) -> Link:
    """One memcpy, by the GPU's clock."""
    flat = platform.allocate(host.num_bytes)
    stream, timer = platform.make_stream(Priority.HIGH), StreamTimer(platform)

    def seconds(num_bytes: int) -> float:
        with platform.current():
            timer.start(stream)
            platform.copy(host.address, flat.address, num_bytes, stream)
            timer.stop(stream)
            return timer.seconds()

    return seconds
