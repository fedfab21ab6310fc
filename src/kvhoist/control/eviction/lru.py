"""Leaf-first least recently used, exactly: of all leaves the one with the least stamp goes."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush, heapreplace

from kvhoist.control.entry import Entry
from kvhoist.control.eviction.base import EvictionPolicy, PolicyContext, is_leaf
from kvhoist.control.tiers import BUSY, CHILD, HELD, READY
from kvhoist.control.untracked import untrack

_ROW_BITS = 32
_ROW = (1 << _ROW_BITS) - 1


class LruPolicy(EvictionPolicy):
    """A hit costs nothing here: the directory has stamped the path. A heap holds one int, (stamp, row), for each leaf.

    The stamp in the heap is a lower bound of the page's own, which only grows; an item that comes up too early is put
    back with the page's stamp. A row's item stays when its page goes and serves the row's next page, which is younger.
    Hence nothing is relinked or searched, and the heap never outgrows the rows. From a leaf the victims go up the path
    while each next page becomes a leaf by it and is no younger: it is the least of all leaves then.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._tier = context.tier
        self._rows = context.rows
        self._heap: list[int] = untrack([])
        self._queued = bytearray()

    def exposed(self, entry: Entry) -> None:
        row, queued = entry.row, self._queued
        if row >= len(queued):
            queued.extend(bytes(len(self._rows) - len(queued)))
        if not queued[row]:
            queued[row] = 1
            heappush(self._heap, (entry.stamp << _ROW_BITS) | row)

    def choose(self, num_pages: int) -> list[Entry]:
        heap, rows, queued = self._heap, self._rows, self._queued
        ready, busy_bits, child = READY[self._tier], BUSY[self._tier], CHILD[self._tier]
        victims: list[Entry] = []
        lost: dict[Entry, int] = {}
        while heap and len(victims) < num_pages:
            item = heap[0]
            row = item & _ROW
            entry = rows[row]
            if not entry.flags & ready or entry.busy & busy_bits != lost.get(entry, 0) * child:
                heappop(heap)
                queued[row] = 0
            elif entry.stamp != item >> _ROW_BITS:
                heapreplace(heap, (entry.stamp << _ROW_BITS) | row)
            else:
                heappop(heap)
                queued[row] = 0
                self._climb(entry, victims, num_pages, lost)
        return victims

    def _climb(self, leaf: Entry, victims: list[Entry], num_pages: int, lost: dict[Entry, int]) -> None:
        """Add `leaf`, then the pages above it as long as the next in order is one of them. `lost` counts the children
        that a page has lost to `victims`, where the climb ended."""
        held, busy_bits, child = HELD[self._tier], BUSY[self._tier], CHILD[self._tier]
        stamp, append = leaf.stamp, victims.append
        victim = leaf
        for _ in range(num_pages - len(victims)):
            append(victim)
            node = victim.parent
            num_lost = 1  # of an only child, `lost` has none
            if node is not None and (node.busy != child or not node.flags & held):
                while node is not None:
                    num_lost = lost.get(node, 0) + 1
                    if node.busy & busy_bits != num_lost * child:
                        lost[node] = num_lost
                        return
                    if node.flags & held:
                        break
                    node = node.parent
            if node is None:
                return
            if node.stamp > stamp:
                lost[node] = num_lost
                self.exposed(node)
                return
            victim = node

    def problems(self, ready: Collection[Entry]) -> list[str]:
        found = []
        items = {item & _ROW: item >> _ROW_BITS for item in self._heap}
        if len(items) != len(self._heap):
            found.append("a row is queued twice")
        if any(self._heap[i] < self._heap[(i - 1) // 2] for i in range(1, len(self._heap))):
            found.append("the queue is no heap")
        if {row for row, queued in enumerate(self._queued) if queued} != items.keys():
            found.append("the marks of queued rows do not match the queue")
        for entry in ready:
            if is_leaf(entry, self._tier) and items.get(entry.row, entry.stamp + 1) > entry.stamp:
                found.append(f"leaf {entry!r} is not queued, or later than its use")
        return found
