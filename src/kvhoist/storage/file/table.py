"""The headers of a segment as its owner keeps them, and how changes get to disk: those that come at once, together."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable

from kvhoist.storage.base import Buffer
from kvhoist.storage.file.direct import ALIGNMENT

_log = logging.getLogger(__name__)


class _Write:
    """One write of what several threads changed: whether it is over, and how it failed."""

    def __init__(self) -> None:
        self.tells = False
        self.over = False
        self.error: OSError | None = None


class OwnTable:
    """A block of the generation and the table's blocks, in memory as they shall be on disk; `write(blocks, offset)`
    brings some of them there, `offset` counted from the generation on. Thread-safe.

    A small write waits in the disk's queue behind the large ones of all blobs: one of the threads that changed
    something writes for all that did so while the write before was under way.
    """

    def __init__(self, table: bytes, num_bytes: int, write: Callable[[Buffer, int], None]) -> None:
        """`table`: headers that the disk has; the rest is zeros. `num_bytes`: whole blocks."""
        self._kept = memoryview(mmap.mmap(-1, num_bytes))
        self._kept[ALIGNMENT:][: len(table)] = table
        self._written = memoryview(mmap.mmap(-1, num_bytes))  # blocks on their way, which must not change meanwhile
        self._write_blocks = write
        self._changed: set[int] = set()
        self._next = _Write()
        self._writing = False
        self._turn = threading.Condition()

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes of the table, as they were last written or tried to."""
        return bytes(self._kept[ALIGNMENT + offset :][:num_bytes])

    def write(self, data: bytes, offset: int, *, tells: bool) -> None:
        """Change the table from `offset` on, and return when that is on its way to stay; with `tells` the generation
        changes too, after it. Raises OSError. Of a generation that cannot be written only the log tells: the pages are
        there, and other processes see them with the next change."""
        begin = ALIGNMENT + offset
        with self._turn:
            self._kept[begin : begin + len(data)] = data
            self._changed.update(range(begin // ALIGNMENT, -(-(begin + len(data)) // ALIGNMENT)))
            mine = self._next
            mine.tells |= tells
            self._turn.wait_for(lambda: mine.over or not self._writing)
            if not mine.over:
                self._writing, self._next = True, _Write()
                blocks, self._changed = sorted(self._changed), set()
                self._written[:ALIGNMENT] = time.monotonic_ns().to_bytes(8, "little").ljust(ALIGNMENT, b"\0")
                for block in blocks:
                    at = slice(block * ALIGNMENT, (block + 1) * ALIGNMENT)
                    self._written[at] = self._kept[at]
        if not mine.over:
            self._lead(mine, blocks)
        if mine.error is not None:
            raise OSError(mine.error.errno, mine.error.strerror)

    def _lead(self, write: _Write, blocks: list[int]) -> None:
        write.error = OSError("the thread that wrote for others did not end")
        try:
            for first, last in _runs(blocks):
                self._write_blocks(self._written[first * ALIGNMENT : last * ALIGNMENT], first * ALIGNMENT)
            write.error = None
            if write.tells:
                self._tell()
        except OSError as error:
            write.error = error
        finally:
            with self._turn:
                write.over, self._writing = True, False
                self._turn.notify_all()

    def _tell(self) -> None:
        try:
            self._write_blocks(self._written[:ALIGNMENT], 0)
        except OSError as error:
            _log.warning("other processes cannot see new pages yet: %s", error)


def _runs(blocks: list[int]) -> list[tuple[int, int]]:
    """Return the runs of ascending numbers, each as (first, last + 1)."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs
