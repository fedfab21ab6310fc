"""The least time that bytes need to a device: one plain copy of as many, from pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from kvhoist.bench.timing import Peak
from kvhoist.geometry import CacheGroup
from kvhoist.memory.arena import HostArena
from kvhoist.memory.pinned import PinnedArena, touch_threads
from kvhoist.platform.base import Device
from kvhoist.platform.open import open_platform

Link: TypeAlias = Callable[[int], float]
"""Copies so many bytes to the device, waits, and returns the seconds that it took."""


@contextmanager
def open_link(device: Device, group: CacheGroup, num_pages: int) -> Iterator[Link]:
    """Give the link to `device` with room for `num_pages` pages on both ends. Raises ConfigError where there is no such
    device, HostMemoryError and DeviceError where there is no room."""
    platform = open_platform(device)
    arena = HostArena(group, num_pages=num_pages, first_touch_threads=touch_threads(platform))
    # In one piece: a copy must not span two registrations.
    with PinnedArena(arena, platform, piece_bytes=arena.num_bytes) as pinned:
        peak = Peak(platform, pinned.region.address, arena.num_bytes)
        yield lambda num_bytes: peak.once(upwards=True, num_bytes=num_bytes)
