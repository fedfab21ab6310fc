"""Leaf-first adaptive replacement (Megiddo and Modha, FAST 2003): the balance of recency and frequency learns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from kvhoist.control.entry import Entry, Space
from kvhoist.control.eviction.base import EvictionPolicy, Peeler, PolicyContext
from kvhoist.control.eviction.segment import Segment, take_oldest

_Ghosts = OrderedDict[tuple[int, bytes], None]


class ArcPolicy(EvictionPolicy):
    """T1 holds pages used once, T2 pages used again, each oldest first; B1 and B2 the keys of pages that left them.

    A page to be reserved whose key is in B1 raises the target of T1 by max(1, |B2| / |B1|), one in B2 lowers it by
    max(1, |B1| / |B2|), within 0 and the tier's pages; it enters T2 when it is ready, any other page enters T1. A hit
    moves a page to the end of T2. While T1 is longer than the target its oldest leaf goes, else the oldest leaf of T2;
    where the one has no leaf, the other's. |T1| + |B1| stays within the tier's pages, and all four within twice that.
    Within a call the deeper page counts as older.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._tier = context.tier
        self._num_pages = context.num_pages
        self.target = 0.0
        self._once = Segment(context.tier)
        self._again = Segment(context.tier)
        self._ghosts_once: _Ghosts = OrderedDict()
        self._ghosts_again: _Ghosts = OrderedDict()
        self._returning: _Ghosts = OrderedDict()

    def admit(self, space: Space, keys: Sequence[bytes]) -> None:
        once, again = self._ghosts_once, self._ghosts_again
        for key in keys:
            ghost = (space.serial, key)
            if ghost in once:
                self.target = min(self.target + max(1.0, len(again) / len(once)), float(self._num_pages))
                del once[ghost]
            elif ghost in again:
                self.target = max(self.target - max(1.0, len(once) / len(again)), 0.0)
                del again[ghost]
            else:
                continue
            self._returning[ghost] = None
        while len(self._returning) > self._num_pages:
            self._returning.popitem(last=False)

    def inserted(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            ghost = (entry.space.serial, entry.key)
            returns = ghost in self._returning
            self._returning.pop(ghost, None)
            (self._again if returns else self._once).put_last(entry)
        self._trim()

    def touched(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            if self._once.discard(entry) or entry in self._again:
                self._again.put_last(entry)

    def removed(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            ghost = (entry.space.serial, entry.key)
            if self._once.discard(entry):
                self._ghosts_once[ghost] = None
            elif self._again.discard(entry):
                self._ghosts_again[ghost] = None
        self._trim()

    def exposed(self, entry: Entry) -> None:
        self._once.exposed(entry)
        self._again.exposed(entry)

    def choose(self, num_pages: int) -> list[Entry]:
        peeler, once, again = Peeler(self._tier), self._once, self._again
        num_once = len(once)
        victims: list[Entry] = []
        while len(victims) < num_pages:
            first, second = (once, again) if num_once > self.target else (again, once)
            leaf = first.oldest_leaf(peeler) or second.oldest_leaf(peeler)
            if leaf is None:
                break
            victims.append(take_oldest(peeler, leaf, once, again))
            num_once -= leaf in once
        return victims

    def problems(self, ready: Collection[Entry]) -> list[str]:
        found = []
        pages = [*self._once, *self._again]
        if len(set(pages)) != len(pages) or set(pages) != set(ready):
            found.append("T1 and T2 are not the ready pages")
        late = [*self._once.unqueued(), *self._again.unqueued()]
        found += [f"leaf {entry!r} is not queued, or later than its use" for entry in late]
        num_ghosts = len(self._ghosts_once) + len(self._ghosts_again)
        if len(pages) + num_ghosts > 2 * self._num_pages or not 0 <= self.target <= self._num_pages:
            found.append("more ghosts than the definition allows, or a target outside of the tier")
        return found

    def _trim(self) -> None:
        """Forget the oldest ghosts beyond the bounds."""
        once, again = self._ghosts_once, self._ghosts_again
        while once and len(self._once) + len(once) > self._num_pages:
            once.popitem(last=False)
        while again and len(self._once) + len(self._again) + len(once) + len(again) > 2 * self._num_pages:
            again.popitem(last=False)
