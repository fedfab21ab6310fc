"""The headers of a segment as its owner keeps them, and how changes get to disk: those that come at once, together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvhoist.private_memory import private_memory
from kvhoist.storage.base import Buffer
from kvhoist.storage.file.direct import ALIGNMENT

_log = logging.getLogger(__name__)


_NEAR_BLOCKS = 64
"""Blocks of 4 KiB that are rather written once more than left out at the cost of a write of its own."""


class _Write:
    """One write of what several threads changed: whether it is over, and how it failed."""

    def __init__(self) -> None:
        self.num_threads = 0
        self.tells = False
        self.over = False
        self.error: OSError | None = None


class OwnTable:
    """A block of the generation and the table's blocks, in memory as they shall be on disk; `write(blocks, offset)`
    brings some of them there, `offset` counted from the generation on. Thread-safe.

    A small write waits in the disk's queue behind the large ones of all blobs: one of the threads that changed
    something writes for all that did so while the write before was under way, and for that one the generation.
    """

    def __init__(self, table: bytes, num_bytes: int, write: Callable[[Buffer, int], None]) -> None:
        """`table`: headers that the disk has; the rest is zeros. `num_bytes`: whole blocks."""
        self._kept = memoryview(private_memory(num_bytes))
        self._kept[ALIGNMENT:][: len(table)] = table
        self._written = memoryview(private_memory(num_bytes))  # blocks on their way, which must not change meanwhile
        self._write_blocks = write
        self._changed: set[int] = set()
        self._next = _Write()
        self._writing = False
        self._untold = False  # whether the disk has headers that its generation does not tell of
        self._turn = threading.Condition()

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes of the table, as they were last written or tried to."""
        return bytes(self._kept[ALIGNMENT + offset :][:num_bytes])

    def write(self, data: bytes, offset: int, *, tells: bool) -> None:
        """Change the table from `offset` on, and return when that is written. With `tells` the generation changes after
        it, with the next write where other threads wait for one. Raises OSError. Of a generation that cannot be
        written only the log tells: the pages are there, and other processes see them with the next change."""
        begin = ALIGNMENT + offset
        with self._turn:
            self._kept[begin : begin + len(data)] = data
            self._changed.update(range(begin // ALIGNMENT, -(-(begin + len(data)) // ALIGNMENT)))
            mine = self._next
            mine.num_threads += 1
            mine.tells |= tells
            self._turn.wait_for(lambda: mine.over or not self._writing)
            if not mine.over:
                self._writing, self._next = True, _Write()
                runs = self._take()
        if not mine.over:
            self._lead(mine, runs)
        if mine.error is not None:
            raise OSError(mine.error.errno, mine.error.strerror)

    def _take(self) -> list[tuple[int, int]]:
        """Set aside what has changed, and return it as runs of blocks. With the lock held."""
        blocks, self._changed = sorted(self._changed | ({0} if self._untold else set())), set()
        runs: list[tuple[int, int]] = []
        for block in blocks:
            if runs and block - runs[-1][1] < _NEAR_BLOCKS:
                runs[-1] = (runs[-1][0], block + 1)
            else:
                runs.append((block, block + 1))
        self._kept[:8] = time.monotonic_ns().to_bytes(8, "little")
        for first, last in runs:
            self._written[first * ALIGNMENT : last * ALIGNMENT] = self._kept[first * ALIGNMENT : last * ALIGNMENT]
        return runs

    def _lead(self, write: _Write, runs: list[tuple[int, int]]) -> None:
        write.error = OSError("the thread that wrote for others did not end")
        try:
            for first, last in runs:
                self._write_blocks(self._written[first * ALIGNMENT : last * ALIGNMENT], first * ALIGNMENT)
            write.error = None
        except OSError as error:
            write.error = error
        finally:
            with self._turn:
                write.over = True
                self._untold = write.tells if write.error is None else self._untold
                tell = self._untold and not self._next.num_threads
                self._writing = tell
                self._turn.notify_all()
        if tell:
            self._tell()

    def _tell(self) -> None:
        try:
            self._written[:8] = time.monotonic_ns().to_bytes(8, "little")
            self._write_blocks(self._written[:ALIGNMENT], 0)
        except OSError as error:
            _log.warning("other processes cannot see new pages yet: %s", error)
        finally:
            with self._turn:
                self._writing = self._untold = False
                self._turn.notify_all()
