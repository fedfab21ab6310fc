"""Ids on their way to the device: small pinned buffers and their device twins, used again when nobody reads them.

A kernel brings them over: a copy would queue behind all copies of pages that are under way in its direction.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvhoist.copy.nests import End, Nest
from kvhoist.copy.relayout import Relayout
from kvhoist.copy.rounds import WORDS
from kvhoist.memory.pinned import close_registration
from kvhoist.platform.base import (
    ByteArray,
    Event,
    IdArray,
    MemoryRegion,
    Module,
    Platform,
    Registration,
    Stream,
    region_of,
)
from kvhoist.platform.cpu import host_view
from kvhoist.private_memory import private_memory

_LEAST_IDS = 1024
_STEP_BYTES, _BLOCK_THREADS, _MAX_BLOCKS = 128, 256, 8
"""Of the kernel that brings ids: a step is a link's read."""


@dataclass(slots=True)
class IdBuffer:
    """`host` is pinned, `device` as long. `free` is an event at the end of the last work that used them."""

    host: ByteArray
    device: MemoryRegion
    registration: Registration
    to_device: Relayout
    free: Event | None = None

    @property
    def mapped_address(self) -> int:
        """Where the device sees `host`."""
        return self.registration.device_address

    def bring(self, num_ids: int, stream: Stream) -> None:
        """Enqueue what puts the first `num_ids` ids at `device`."""
        self.to_device.launch(self.mapped_address, 0, 0, -(-8 * num_ids // _STEP_BYTES), stream)


class IdBuffers:
    """A pool of IdBuffers. Thread-safe."""

    def __init__(self, platform: Platform, module: Module) -> None:
        self._platform = platform
        self._module = module
        self._lock = threading.Lock()
        self._buffers: list[IdBuffer] = []

    def take(self, ids: IdArray) -> IdBuffer:
        """Return a buffer whose host side holds `ids`; the caller gives it back with `free` set."""
        num_bytes = ids.nbytes
        with self._lock:
            fitting = (i for i, one in enumerate(self._buffers) if one.host.nbytes >= num_bytes and _is_free(one))
            found = next(fitting, None)
            buffer = self._buffers.pop(found) if found is not None else None
        if buffer is None:
            buffer = self._make(8 * max(_LEAST_IDS, 1 << (len(ids) - 1).bit_length()))
        buffer.host[:num_bytes] = ids.view(np.uint8)
        return buffer

    def give_back(self, buffer: IdBuffer, free: Event | None) -> None:
        buffer.free = free
        with self._lock:
            self._buffers.append(buffer)

    @contextlib.contextmanager
    def lent(self, ids: IdArray, marks: Sequence[tuple[int, Event]]) -> Iterator[IdBuffer]:
        """Lend a buffer that holds `ids` until the last of a copy's `marks`, which the block fills. Where it raises,
        nothing may be under way any more."""
        buffer = self.take(ids)
        try:
            yield buffer
        except BaseException:
            self.give_back(buffer, None)
            raise
        self.give_back(buffer, marks[-1][1])

    def _make(self, num_bytes: int) -> IdBuffer:
        host = self._platform.allocate_host(num_bytes) or region_of(_whole_pages(num_bytes))
        device = self._platform.allocate(num_bytes)
        src, dst = (End(0, start, _STEP_BYTES, 0) for start in (0, device.address))
        to_device = Relayout(
            [Nest(src, dst, _STEP_BYTES)],
            self._module,
            self._platform,
            word_bytes=WORDS[0],
            scatters=True,
            steps_per_page=1,
            steps_per_id=1,
            block_threads=_BLOCK_THREADS,
            max_blocks=_MAX_BLOCKS,
        )
        return IdBuffer(host_view(host), device, self._platform.register(host), to_device)

    def close(self) -> None:
        """Unregister all. Nothing may use them any more."""
        for buffer in self._buffers:
            close_registration(buffer.registration)
        self._buffers.clear()


def _whole_pages(num_bytes: int) -> ByteArray:
    """Return memory that shares no page with other memory: pages are what a runtime pins, and unpins."""
    return np.frombuffer(private_memory(num_bytes), dtype=np.uint8)


def _is_free(buffer: IdBuffer) -> bool:
    return buffer.free is None or buffer.free.query()
