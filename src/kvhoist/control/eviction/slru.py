"""Leaf-first segmented LRU: pages hit once more are protected from those that pass through once."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvhoist.control.entry import Entry
from kvhoist.control.eviction.base import EvictionPolicy, Peeler, PolicyContext
from kvhoist.control.eviction.segment import Segment, take_oldest

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
        self._probation = Segment(context.tier)
        self._protected = Segment(context.tier)

    def inserted(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            self._probation.put_last(entry)

    def touched(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            if self._probation.discard(entry) or entry in self._protected:
                self._protected.put_last(entry)
        while len(self._protected) > self._most_protected:
            self._probation.put_last(self._protected.pop_oldest())

    def removed(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if not self._probation.discard(entry):
                self._protected.discard(entry)

    def exposed(self, entry: Entry) -> None:
        self._probation.exposed(entry)
        self._protected.exposed(entry)

    def choose(self, num_pages: int) -> list[Entry]:
        peeler = Peeler(self._tier)
        victims: list[Entry] = []
        while len(victims) < num_pages:
            leaf = self._probation.oldest_leaf(peeler) or self._protected.oldest_leaf(peeler)
            if leaf is None:
                break
            victims.append(take_oldest(peeler, leaf, self._probation, self._protected))
        return victims

    def problems(self, ready: Collection[Entry]) -> list[str]:
        pages = [*self._probation, *self._protected]
        agree = len(set(pages)) == len(pages) and set(pages) == set(ready)
        found = [] if agree else ["the segments are not the ready pages"]
        late = [*self._probation.unqueued(), *self._protected.unqueued()]
        return found + [f"leaf {entry!r} is not queued, or later than its use" for entry in late]
