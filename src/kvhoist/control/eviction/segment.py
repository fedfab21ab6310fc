"""A list of pages in order of use, from which leaves are taken oldest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from kvhoist.control.entry import Entry
from kvhoist.control.eviction.base import Peeler


class Segment:
    """Pages with the number under which each was last put at the end; their order is that of the numbers.

    An OrderedDict, because a dict walks over all it has lost at its front to find its oldest key.
    """

    def __init__(self) -> None:
        self._numbers: OrderedDict[Entry, int] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._numbers

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._numbers)

    def number(self, entry: Entry) -> int:
        return self._numbers[entry]

    def put_last(self, entry: Entry) -> None:
        """Make `entry` the last used page of this segment, whether it was here or not."""
        self._numbers.pop(entry, None)
        self._numbers[entry] = self._next
        self._next += 1

    def oldest(self) -> Entry:
        return next(iter(self._numbers))

    def discard(self, entry: Entry) -> bool:
        """Take `entry` out and tell whether it was here."""
        return self._numbers.pop(entry, None) is not None


class Scan:
    """Walks segments from their oldest pages on and takes leaves. Nothing in them may change meanwhile."""

    def __init__(self, peeler: Peeler, segments: Sequence[Segment]) -> None:
        self._peeler = peeler
        self._segments = segments
        self._ahead = [iter(segment) for segment in segments]
        self._passed = [-1] * len(segments)
        self._exposed: list[list[tuple[int, int, Entry]]] = [[] for _ in segments]

    def peek(self, index: int) -> Entry | None:
        """Return the oldest leaf of a segment, None if it has none."""
        exposed = self._exposed[index]
        if not exposed:
            for entry in self._ahead[index]:
                self._passed[index] = number = self._segments[index].number(entry)
                if self._peeler.is_leaf(entry):
                    exposed.append((number, 0, entry))
                    break
        return exposed[0][2] if exposed else None

    def take(self, index: int) -> Entry:
        """Take the page that `peek` returned last."""
        entry = heappop(self._exposed[index])[2]
        ancestor = self._peeler.take(entry)
        if ancestor is not None:
            for other, segment in enumerate(self._segments):
                if ancestor in segment and segment.number(ancestor) <= self._passed[other]:
                    heappush(self._exposed[other], (segment.number(ancestor), 0, ancestor))
        return entry
