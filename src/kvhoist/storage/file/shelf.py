"""A segment file with what one process knows of its slots, and the place of a page in it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvhoist.storage.file.segment import Segment


@dataclass(slots=True, eq=False)
class Shelf:
    """A segment and what this process knows of its slots.

    `free` is a heap of slots to give out; `stale` those of them whose header on disk is still a valid one and must be
    cleared before the slot is written. `num_writing` slots are given out and not yet published; `num_users` calls are
    inside the file, which is closed when it is `gone` and they are out. Of a foreign segment `checks` keeps the last
    word of each header as it was last read, `generation` when that was.
    """

    segment: Segment
    owned: bool
    identities: list[bytes | None]
    num_pages: int = 0
    free: list[int] = field(default_factory=list)
    stale: set[int] = field(default_factory=set)
    num_writing: int = 0
    num_users: int = 0
    last_used: int = 0
    gone: bool = False
    closed: bool = False
    checks: npt.NDArray[np.uint64] | None = None
    generation: int = -1
    orphan_since: float | None = None

    @classmethod
    def of(cls, segment: Segment, *, owned: bool) -> Shelf:
        return cls(segment, owned, [None] * segment.num_slots)

    def close_if_unused(self, lock: threading.Condition) -> None:
        """Close the file where the segment is gone and no call is inside. Called without the lock."""
        with lock:
            closes = self.gone and not self.closed and not self.num_users and not self.num_writing
            self.closed |= closes
        if closes:
            self.segment.close()


class Place(NamedTuple):
    """Where a page lies. A page that is written anew gets a new Place: compare with `is`."""

    shelf: Shelf
    slot: int
