"""The staging ring: a bounded piece of device memory that transfers of any length pass through, piece after piece."""

from __future__ import annotations

import threading
from types import TracebackType

from kvhoist.errors import ConfigError
from kvhoist.platform.base import Event, MemoryRegion, Platform, Stream
from kvhoist.units import format_bytes

CHUNKS = 3
"""A ring holds so many of the largest chunks: one is filled, one is emptied, and one lets either side be late."""


class Chunk:
    """A piece of the ring, at `address`. `filled` is for its user, to order the two halves of its work; `free` is that
    work's end. `first` to `stop` are the bytes that nobody has taken since."""

    __slots__ = ("address", "filled", "first", "free", "stop")

    def __init__(self, filled: Event, free: Event) -> None:
        self.address = self.first = self.stop = 0
        self.filled = filled
        self.free = free


class StagingRing:
    """Pieces of one region, taken in turn by all transfers of one direction:

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
        self._in_use: list[Chunk] = []
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
                expected=f"at most {format_bytes(self.max_chunk_bytes)}, a third of it",
                remedy="Raise staging_bytes, or use smaller pages.",
            )
        start = self._head
        if start + num_bytes > self._region.end:
            start = self._region.address
        stop = self._head = start + num_bytes
        for earlier in [chunk for chunk in self._in_use if chunk.first < stop and start < chunk.stop]:
            stream.wait(earlier.free)
            earlier.first = stop  # what lies before was taken in the turns before
            if earlier.first >= earlier.stop:
                self._in_use.remove(earlier)
                self._spare.append(earlier)
        chunk = self._spare.pop() if self._spare else Chunk(self._platform.make_event(), self._platform.make_event())
        chunk.address = chunk.first = start
        chunk.stop = stop
        return chunk

    def give_back(self, chunk: Chunk, stream: Stream) -> None:
        """All work on `chunk` is enqueued, and ends in `stream`."""
        stream.record(chunk.free)
        self._in_use.append(chunk)
