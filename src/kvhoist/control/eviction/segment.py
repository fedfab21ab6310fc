"""A list of pages in order of use, from which leaves are taken oldest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

from kvhoist.control.entry import Entry
from kvhoist.control.eviction.base import Peeler, is_leaf
from kvhoist.control.tiers import Tier


class Segment:
    """Pages with the number under which each was last put at the end; their order is that of the numbers.

    A heap holds an item for each leaf, so that no pages are walked over that cannot go. An item's number is a lower
    bound of the page's; it is put back when it comes up too early. An OrderedDict keeps the order, because a dict walks
    over all it has lost at its front to find its oldest key.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._numbers: OrderedDict[Entry, int] = OrderedDict()
        self._next = 0
        self._heap: list[tuple[int, Entry]] = []
        self._queued: dict[Entry, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._numbers

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._numbers)

    def put_last(self, entry: Entry) -> None:
        """Make `entry` the last used page of this segment, whether it was here or not."""
        known = entry in self._numbers
        self._numbers[entry] = self._next
        self._next += 1
        if known:
            self._numbers.move_to_end(entry)
        elif is_leaf(entry, self._tier):
            self.exposed(entry)

    def pop_oldest(self) -> Entry:
        entry = self._numbers.popitem(last=False)[0]
        self._queued.pop(entry, None)
        return entry

    def discard(self, entry: Entry) -> bool:
        """Take `entry` out and tell whether it was here."""
        self._queued.pop(entry, None)
        return self._numbers.pop(entry, None) is not None

    def exposed(self, entry: Entry) -> None:
        """Note that `entry` is a leaf, or would be; pages of other segments are ignored."""
        if entry in self._numbers and entry not in self._queued:
            self._queued[entry] = number = self._numbers[entry]
            heappush(self._heap, (number, entry))
            if len(self._heap) > 2 * len(self._queued) + 1024:
                self._heap = [(number, entry) for entry, number in self._queued.items()]
                heapify(self._heap)

    def oldest_leaf(self, peeler: Peeler) -> Entry | None:
        """Return the oldest page that is a leaf when what `peeler` took is gone, None where there is none."""
        heap, queued = self._heap, self._queued
        while heap:
            number, entry = heap[0]
            if queued.get(entry) != number:
                heappop(heap)
            elif not peeler.is_leaf(entry):
                heappop(heap)
                del queued[entry]
            elif self._numbers[entry] != number:
                queued[entry] = self._numbers[entry]
                heapreplace(heap, (queued[entry], entry))
            else:
                return entry
        return None

    def unqueued(self) -> Iterator[Entry]:
        """Return leaves that are not queued, or later than their turn. There should be none."""
        items = {entry: number for number, entry in self._heap if self._queued.get(entry) == number}
        for entry, number in self._numbers.items():
            if is_leaf(entry, self._tier) and items.get(entry, number + 1) > number:
                yield entry


def take_oldest(peeler: Peeler, leaf: Entry, *segments: Segment) -> Entry:
    """Take `leaf` off in thought, and let the segments know of the page that becomes a leaf by it."""
    ancestor = peeler.take(leaf)
    if ancestor is not None:
        for segment in segments:
            segment.exposed(ancestor)
    return leaf
