"""Leaf-first least frequently used: of all leaves the one with the fewest uses goes, of those the least stamp."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heappop, heappush

from kvhoist.control.entry import Entry
from kvhoist.control.eviction.base import EvictionPolicy, Peeler, PolicyContext, is_leaf

_Item = tuple[int, int, int, Entry]


class LfuPolicy(EvictionPolicy):
    """Uses are counted from when the page became ready here (1), each hit is one more; a page that returns starts anew.

    A heap holds an item (uses, stamp, number, entry) for each leaf. Both only grow while the page is here, so that an
    item is a lower bound and is put back when it comes up too early. The number tells the valid item of a page.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._tier = context.tier
        self._uses: dict[Entry, int] = {}
        self._queued: dict[Entry, int] = {}
        self._heap: list[_Item] = []
        self._number = 0

    def inserted(self, entries: Sequence[Entry]) -> None:
        self._uses.update(dict.fromkeys(entries, 1))

    def touched(self, entries: Sequence[Entry]) -> None:
        uses = self._uses
        for entry in entries:
            if entry in uses:
                uses[entry] += 1

    def removed(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._uses.pop(entry, None)
            self._queued.pop(entry, None)
        if len(self._heap) > 2 * len(self._queued) + 1024:
            self._heap = sorted(item for item in self._heap if self._queued.get(item[3]) == item[2])

    def exposed(self, entry: Entry) -> None:
        if entry not in self._queued:
            self._queue(entry)

    def choose(self, num_pages: int) -> list[Entry]:
        heap, peeler = self._heap, Peeler(self._tier)
        victims: list[Entry] = []
        while heap and len(victims) < num_pages:
            uses, stamp, number, entry = heappop(heap)
            if self._queued.get(entry) != number:
                continue
            del self._queued[entry]
            if not peeler.is_leaf(entry):
                continue
            if (uses, stamp) != (self._uses[entry], entry.stamp):
                self._queue(entry)
                continue
            victims.append(entry)
            parent = peeler.take(entry)
            if parent is not None:
                self.exposed(parent)
        return victims

    def problems(self, ready: Collection[Entry]) -> list[str]:
        found = []
        if set(ready) != self._uses.keys():
            found.append("the pages counted are not the ready ones")
        items = {entry: (uses, stamp) for uses, stamp, number, entry in self._heap if self._queued.get(entry) == number}
        if items.keys() != self._queued.keys():
            found.append("a queued page has no item")
        for entry in ready:
            if is_leaf(entry, self._tier) and not (
                entry in items and items[entry] <= (self._uses.get(entry, 0), entry.stamp)
            ):
                found.append(f"leaf {entry!r} is not queued, or later than its use")
        return found

    def _queue(self, entry: Entry) -> None:
        self._number += 1
        self._queued[entry] = self._number
        heappush(self._heap, (self._uses[entry], entry.stamp, self._number, entry))
