"""Host memory that a device may read and write by DMA: registered in pieces, never in the middle of a page."""

from __future__ import annotations

import logging
import os
from types import TracebackType

import numpy as np

from kvhoist.errors import DeviceError
from kvhoist.memory.arena import HostArena
from kvhoist.platform.base import IdArray, MemoryRegion, Platform, Registration

_log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 30
"""A driver pins a piece in one call, which nobody can interrupt: about 0.1 s for one of this length."""


def touch_threads(platform: Platform) -> int:
    """Return how many threads should write an arena once before it is pinned, else the driver does it in one."""
    return min(16, os.cpu_count() or 1) if platform.capabilities.registers_host else 0


class PinnedArena:
    """An arena registered with a platform's device until `close`, or the end of a `with` block.

    Raises DeviceError where the driver refuses, having unregistered what it had taken.
    """

    def __init__(self, arena: HostArena, platform: Platform, *, piece_bytes: int = _PIECE_BYTES) -> None:
        self.region = arena.region
        self._registrations: list[Registration] = []
        self._pitch_bytes = pitch = arena.layout.group.page_pitch_bytes
        self._pages_per_piece = max(1, piece_bytes // pitch)
        step = self._pages_per_piece * pitch
        try:
            for start in range(0, arena.num_bytes, step):
                length = min(step, arena.num_bytes - start)
                piece = MemoryRegion(self.region.address + start, length, self.region.device, self.region.owner)
                self._registrations.append(platform.register(piece))
        except BaseException:
            self.close()
            raise
        self._addresses = np.array([piece.device_address for piece in self._registrations], dtype=np.int64)

    def device_addresses(self, pages: IdArray) -> IdArray:
        """Return where the device sees host pages."""
        piece, page = np.divmod(pages, self._pages_per_piece)
        addresses: IdArray = self._addresses[piece] + page * self._pitch_bytes
        return addresses

    def __enter__(self) -> PinnedArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_pieces(self) -> int:
        return len(self._registrations)

    def close(self) -> None:
        """Unregister. Idempotent; no copy may be under way. Where the device is gone, so are its registrations: what
        the driver says to that is logged."""
        while self._registrations:
            close_registration(self._registrations.pop())


def close_registration(registration: Registration) -> None:
    """Unregister, and log what the driver has against it: whoever closes can do nothing about that."""
    try:
        registration.close()
    except DeviceError as error:
        _log.warning("host memory could not be unpinned: %s", error)
