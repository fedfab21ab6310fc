"""Leaf-first segmented LRU: pages hit once more are protected from those that pass through once."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvhoist.control.entry import Entry
from kvhoist.control.eviction.base import EvictionPolicy, Peeler, PolicyContext
from kvhoist.control.eviction.segment import Scan, Segment

PROTECTED_SHARE = 0.8
"""The part of a tier that protected pages may fill."""


class SlruPolicy(EvictionPolicy):
    """A new page enters the probation segment; a hit makes it the last of the protected one. When that has more than
    its share, its oldest pages become the last of probation. The oldest leaf of probation goes; where it has none, the
    oldest protected leaf. Within a call the deeper page counts as older.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._tier = context.tier
        self._most_protected = int(context.num_pages * PROTECTED_SHARE)
        self._probation = Segment()
        self._protected = Segment()

    def inserted(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            self._probation.put_last(entry)

    def touched(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            if self._probation.discard(entry) or entry in self._protected:
                self._protected.put_last(entry)
        while len(self._protected) > self._most_protected:
            entry = self._protected.oldest()
            self._protected.discard(entry)
            self._probation.put_last(entry)

    def removed(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if not self._probation.discard(entry):
                self._protected.discard(entry)

    def choose(self, num_pages: int) -> list[Entry]:
        scan = Scan(Peeler(self._tier), (self._probation, self._protected))
        victims: list[Entry] = []
        while len(victims) < num_pages:
            if scan.peek(0) is not None:
                victims.append(scan.take(0))
            elif scan.peek(1) is not None:
                victims.append(scan.take(1))
            else:
                break
        return victims

    def problems(self, ready: Collection[Entry]) -> list[str]:
        pages = [*self._probation, *self._protected]
        return (
            []
            if len(set(pages)) == len(pages) and set(pages) == set(ready)
            else ["the segments are not the ready pages"]
        )
