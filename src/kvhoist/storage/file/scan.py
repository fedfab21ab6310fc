"""Reading header tables: what a segment holds, at start and when its owner wrote to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvhoist.storage.record import HEADER_BYTES, IDENTITY, blob_bytes_of, header_fault, written_at_of

_WORDS = HEADER_BYTES // 8


@dataclass(frozen=True, slots=True)
class Scan:
    """`found`: (milliseconds since 1970 when written, slot, identity) of each sound header; `damaged`: slots whose
    header is neither sound nor empty, or whose blob cannot lie in the slot."""

    found: list[tuple[int, int, bytes]]
    damaged: list[int]


def last_words(table: bytes) -> npt.NDArray[np.uint64]:
    """Return the last 8 bytes of each header, its own check: equal where a header did not change, 0 where empty."""
    return np.frombuffer(table, dtype="<u8").reshape(-1, _WORDS)[:, -1].copy()


def used_slots(table: bytes) -> list[int]:
    """Return the slots whose header is not all zeros."""
    used: list[int] = np.flatnonzero(np.frombuffer(table, dtype="<u8").reshape(-1, _WORDS).any(axis=1)).tolist()
    return used


def scan_slots(table: bytes, slots: Sequence[int], *, pitch_bytes: int, slots_in_file: int) -> Scan:
    """Read the headers of `slots`. Costs about 2 µs a page."""
    found: list[tuple[int, int, bytes]] = []
    damaged: list[int] = []
    for slot in slots:
        header = table[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES]
        if header_fault(header) is not None or blob_bytes_of(header) > pitch_bytes or slot >= slots_in_file:
            damaged.append(slot)
        else:
            found.append((written_at_of(header), slot, header[IDENTITY]))
    return Scan(found, damaged)
