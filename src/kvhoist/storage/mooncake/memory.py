"""Memory that the transfer engine knows: what its owners registered, and a pool for all that lies elsewhere."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvhoist.errors import StorageError
from kvhoist.private_memory import private_memory
from kvhoist.storage.base import Buffer, address_of


class Regions:
    """Registered memory by address, each region as often as it was registered. Keeps nobody's memory alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: Counter[tuple[int, int]] = Counter()

    def add(self, start: int, num_bytes: int) -> bool:
        """Note a region; True where it is new."""
        with self._lock:
            self._uses[start, num_bytes] += 1
            return self._uses[start, num_bytes] == 1

    def discard(self, start: int, num_bytes: int) -> bool:
        """Forget a region once; True where that was its last use."""
        with self._lock:
            if not self._uses[start, num_bytes]:
                del self._uses[start, num_bytes]
                return False
            self._uses[start, num_bytes] -= 1
            last = not self._uses[start, num_bytes]
            if last:
                del self._uses[start, num_bytes]
            return last

    def holds(self, start: int, num_bytes: int) -> bool:
        """Tell whether all these bytes lie in one region."""
        with self._lock:
            return any(first <= start and start + num_bytes <= first + length for first, length in self._uses)


class Pool:
    """Memory of its own, given out in pieces of at most half of it; `start` is its address. Thread-safe."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = private_memory(num_bytes)
        self._view = memoryview(self._memory)
        self.start = address_of(self._view)
        self.num_bytes = num_bytes
        self.max_piece_bytes = num_bytes // 2
        self._free = [(0, num_bytes)]
        self._changed = threading.Condition()

    @contextmanager
    def piece(self, num_bytes: int, timeout_s: float) -> Iterator[tuple[int, Buffer]]:
        """Lend a piece: its address and its bytes. Waits for others to give theirs back; raises StorageError where that
        takes longer than `timeout_s`, or where no piece can be as long."""
        if num_bytes > self.max_piece_bytes:
            raise StorageError(
                "a page that is larger than half of the bounce memory",
                got=f"{num_bytes} bytes",
                expected=f"at most {self.max_piece_bytes}, or a page in registered memory",
                remedy="Raise the option bounce of the mooncake store.",
            )
        with self._changed:
            if not self._changed.wait_for(lambda: self._first_fit(num_bytes) is not None, timeout_s):
                raise StorageError("no bounce memory came free", expected=f"some within {timeout_s:.0f} s")
            offset = self._take(num_bytes)
        view = self._view[offset : offset + num_bytes]
        try:
            yield self.start + offset, view
        finally:
            view.release()
            with self._changed:
                self._give(offset, num_bytes)
                self._changed.notify_all()

    def close(self) -> None:
        """Give the memory back; no piece may be out."""
        self._view.release()
        self._memory.close()

    def _first_fit(self, num_bytes: int) -> int | None:
        return next((i for i, (_, length) in enumerate(self._free) if length >= num_bytes), None)

    def _take(self, num_bytes: int) -> int:
        index = self._first_fit(num_bytes)
        assert index is not None, "wait_for saw it under the same lock"
        offset, length = self._free[index]
        self._free[index : index + 1] = [(offset + num_bytes, length - num_bytes)] if length > num_bytes else []
        return offset

    def _give(self, offset: int, num_bytes: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (offset, num_bytes)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged
