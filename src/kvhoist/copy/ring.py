"""The staging ring: a bounded piece of device memory that transfers of any length pass through, piece after piece."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

from kvhoist.errors import ConfigError
from kvhoist.platform.base import Event, MemoryRegion, Platform, Stream
from kvhoist.units import format_bytes

CHUNKS = 4
"""The ring holds so many of the largest chunks: one is filled, one is emptied, and two let either side be late."""


class Chunk:
    """`num_bytes` of the ring. `filled` is for its user, to order the two halves of its work."""

    __slots__ = ("address", "filled", "free")

    def __init__(self, filled: Event, free: Event) -> None:
        self.address = 0
        self.filled = filled
        self.free = free


class StagingRing:
    """Pieces of one region, taken in turn by all transfers of both directions:

        with ring:
            chunk = ring.take(num_bytes, first_stream)
            ...                              # enqueue all that uses it
            ring.give_back(chunk, last_stream)

    Work on a chunk waits on the device, never on the CPU, for the earlier users of its bytes; these were enqueued
    before and wait for nothing that comes later. Hence no deadlock, whatever the number and length of transfers. The
    block serialises those who enqueue.
    """

    def __init__(self, region: MemoryRegion, platform: Platform) -> None:
        self.max_chunk_bytes = region.num_bytes // CHUNKS
        self._region = region
        self._platform = platform
        self._in_use: deque[Chunk] = deque()
        self._spare: list[Chunk] = []
        self._head = region.address
        self._lock = threading.Lock()

    def __enter__(self) -> StagingRing:
        self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def take(self, num_bytes: int, stream: Stream) -> Chunk:
        """Return the next `num_bytes`; what `stream` does from now on comes after their earlier users.

        Raises ConfigError for more than `max_chunk_bytes`.
        """
        if num_bytes > self.max_chunk_bytes:
            raise ConfigError(
                "more than the staging ring passes at once",
                got=format_bytes(num_bytes),
                expected=f"at most {format_bytes(self.max_chunk_bytes)}, a quarter of it",
                remedy="Raise staging_bytes, or use smaller pages.",
            )
        start = self._head
        wraps = start + num_bytes > self._region.end
        if wraps:
            start = self._region.address
        stop = start + num_bytes
        in_use = self._in_use
        while in_use and ((wraps and in_use[0].address >= self._head) or start <= in_use[0].address < stop):
            oldest = in_use.popleft()
            stream.wait(oldest.free)
            self._spare.append(oldest)
        chunk = self._spare.pop() if self._spare else Chunk(self._platform.make_event(), self._platform.make_event())
        chunk.address = start
        self._head = stop
        return chunk

    def give_back(self, chunk: Chunk, stream: Stream) -> None:
        """All work on `chunk` is enqueued, and ends in `stream`."""
        stream.record(chunk.free)
        self._in_use.append(chunk)
