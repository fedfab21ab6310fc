"""The table under the directory: rows of entries, what each tier holds, and the counts of children that follow."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvhoist.control.entry import SHARD_MASK, Entry, Space
from kvhoist.control.eviction.base import EvictionPolicy
from kvhoist.control.page_ids import PageIds
from kvhoist.control.tiers import BUSY, CHILD, CHILDREN, DOOMED, HELD, HELD_ANY, PIN, READY, Tier
from kvhoist.control.untracked import untrack, untrack_all

_NO_PAGE = -1
_ROWS_AT_ONCE = 1024

_getrefcount: Callable[[object], int] = getattr(sys, "getrefcount", lambda _: 1 << 30)


def _references_if_alone() -> int:
    rows = [Entry()]
    entries = rows[:]
    return max(map(_getrefcount, entries))


_ALONE = _references_if_alone()
"""The reference count of an entry to which only its row and a list, as in `EntryTable._blank`, refer."""


@dataclass(slots=True)
class TierBook:
    """One tier: who holds which page (`column[row]`), which goes first, and what happened so far (pages)."""

    tier: Tier
    ids: PageIds
    column: array[int]
    policy: EvictionPolicy
    num_filling: int = 0
    num_stored: int = 0
    num_evicted: int = 0
    num_no_room: int = 0
    num_failed: int = 0
    admits: bool = field(init=False)
    """Whether the policy wants to hear of the pages before they are reserved: they are listed for that alone."""

    def __post_init__(self) -> None:
        self.admits = type(self.policy).admit is not EvictionPolicy.admit


class EntryTable:
    """Creates and removes entries and keeps these invariants: an entry holds a copy or has a descendant that does;
    `busy` counts, by tier, the children that hold a copy there, themselves or below them.

    A removed entry (no flags, not busy) keeps its row, and serves again as another if nobody refers to it any more:
    making one and hiding it from the garbage collector costs 0.5 µs, a seventh of an insert with eviction.
    """

    def __init__(self) -> None:
        self.rows: list[Entry] = untrack([])
        self.columns: tuple[array[int], ...] = tuple(array("i") for _ in Tier)
        self.books: dict[Tier, TierBook] = {}
        self._spare: list[Entry] = untrack([])
        self.spare = self._spare.append

    @property
    def num_entries(self) -> int:
        return len(self.rows) - len(self._spare)

    def entry(self, space: Space, key: bytes) -> Entry | None:
        row = space.shards[key[-1] & SHARD_MASK].get(key)
        return None if row is None else self.rows[row]

    def entries(self) -> list[Entry]:
        """Return all entries that are not removed."""
        return [entry for entry in self.rows if entry.flags or entry.busy]

    def is_current(self, entry: Entry) -> bool:
        """Tell whether `entry` is one of this table's and not removed."""
        row = entry.row
        return (entry.flags or entry.busy) != 0 and row < len(self.rows) and self.rows[row] is entry

    def create(
        self,
        space: Space,
        parent: Entry | None,
        keys: Sequence[bytes],
        pages: list[int],
        book: TierBook,
        stamp: int,
    ) -> list[Entry]:
        """Append entries for the chain `keys` to `parent`; the last len(pages) of them, at least one, are being filled
        in `pages` and pinned once, those before them hold nothing. Returns those being filled."""
        tier, column, shards = book.tier, book.column, space.shards
        held, child, child_and_pin = HELD[tier], CHILD[tier], CHILD[tier] + PIN[tier]
        first_parent = parent
        num_empty = len(keys) - len(pages)
        if num_empty:
            pages = [_NO_PAGE] * num_empty + pages
        created = self._blank(len(keys))
        for entry, key, page in zip(created, keys, pages, strict=True):
            row = entry.row
            entry.key = key
            entry.parent = parent
            entry.space = space
            entry.stamp = stamp
            entry.flags = held
            entry.busy = child_and_pin
            column[row] = page
            entry.shard = shard = shards[key[-1] & SHARD_MASK]
            shard[key] = row
            parent = entry
        entry.busy = PIN[tier]
        self._occupy(first_parent, tier)
        if not num_empty:
            return created
        for entry in created[:num_empty]:
            entry.flags = 0
            entry.busy = child
        return created[num_empty:]

    def _blank(self, num_entries: int) -> list[Entry]:
        """Return entries that have a row and nothing else: removed ones nobody refers to, and new ones."""
        rows, spare = self.rows, self._spare
        entries = spare[: -num_entries - 1 : -1]
        del spare[len(spare) - len(entries) :]
        fresh: list[Entry] = []
        if entries and max(map(_getrefcount, entries)) > _ALONE:
            for i, num_references in enumerate(map(_getrefcount, entries)):
                if num_references > _ALONE:
                    row = entries[i].row
                    rows[row] = entries[i] = entry = Entry()
                    entry.row = row
                    fresh.append(entry)
        num_lacking = num_entries - len(entries)
        if num_lacking:
            self._extend_columns(num_lacking)
            for row in range(len(rows), len(rows) + num_lacking):
                entry = Entry()
                entry.row = row
                fresh.append(entry)
            rows += fresh[-num_lacking:]
            entries += fresh[-num_lacking:]
        untrack_all(fresh)
        return entries

    def hold(self, entry: Entry, page: int, book: TierBook) -> None:
        """Start to fill `page` for an entry that holds none in the tier, and pin it once."""
        tier = book.tier
        book.column[entry.row] = page
        entry.flags |= HELD[tier]
        had_children = entry.busy & CHILDREN[tier]
        entry.busy += PIN[tier]
        if not had_children:
            self._occupy(entry.parent, tier)

    def drop(self, entry: Entry, book: TierBook) -> int:
        """Take the unpinned copy in the tier from `entry`, which is removed if it was the last reason for it; so are
        its ancestors. Returns the page id, which is still to be freed."""
        page = self.release(entry, book)
        if not entry.busy & CHILDREN[book.tier]:
            self.vacate(entry.parent, book)
        self.prune(entry)
        return page

    def release(self, entry: Entry, book: TierBook) -> int:
        """Take the copy from `entry` and nothing else: its parent's count and its own removal are the caller's."""
        entry.flags &= ~(HELD[book.tier] | READY[book.tier])
        return book.column[entry.row]

    def evict(self, victims: Sequence[Entry], book: TierBook) -> list[int]:
        """Drop leaves one after the other and return their page ids, which are still to be freed. Stops at what is no
        leaf of this tier, so that fewer ids are returned than victims were given."""
        tier, column, rows, spare = book.tier, book.column, self.rows, self._spare
        ready, busy_bits, child, held = READY[tier], BUSY[tier], CHILD[tier], HELD[tier]
        only_here, num_rows = held | ready, len(rows)
        pages: list[int] = []
        append = pages.append
        exposed: Entry | None = None
        left = 0
        for entry in victims:
            if entry is exposed and exposed is not None:  # the parent of the page before: just now become a leaf
                busy, row = left, entry.row
            else:
                if type(entry) is not Entry:
                    break
                busy, row = entry.busy, entry.row
                if not entry.flags & ready or busy & busy_bits or row >= num_rows or rows[row] is not entry:
                    break
                if exposed is not None:
                    book.policy.exposed(exposed)
            exposed = None
            append(column[row])
            flags = entry.flags
            entry.flags = flags = 0 if flags == only_here else flags & ~only_here
            parent = entry.parent
            if parent is not None:
                parent.busy = left = parent.busy - child
                if not left or not left & busy_bits:
                    if parent.flags & held:
                        exposed = parent
                    else:
                        self.vacate(parent.parent, book)
            if not flags and not busy:
                del entry.shard[entry.key]
                entry.parent = None
                spare.append(entry)
                if parent is not None and not parent.flags:
                    self.prune(parent)
        if exposed is not None:
            book.policy.exposed(exposed)
        return pages

    def vacate(self, parent: Entry | None, book: TierBook) -> None:
        """Book that a child of `parent` no longer holds a copy in the tier, neither itself nor below it."""
        tier = book.tier
        held, children, child = HELD[tier], CHILDREN[tier], CHILD[tier]
        while parent is not None:
            parent.busy -= child
            if parent.flags & held:
                if not parent.busy & BUSY[tier]:
                    book.policy.exposed(parent)
                return
            if parent.busy & children:
                return
            parent = parent.parent

    def prune(self, entry: Entry | None) -> None:
        """Remove `entry` and its ancestors as far as they hold nothing and have no descendant that does."""
        while entry is not None and not entry.busy and not entry.flags & HELD_ANY:
            parent = entry.parent
            if not entry.flags & DOOMED:
                del entry.shard[entry.key]
            entry.flags = 0
            entry.parent = None
            self._spare.append(entry)
            entry = parent

    def _occupy(self, parent: Entry | None, tier: Tier) -> None:
        held, children, child = HELD[tier], CHILDREN[tier], CHILD[tier]
        while parent is not None:
            occupied = parent.flags & held or parent.busy & children
            parent.busy += child
            if occupied:
                return
            parent = parent.parent

    def _extend_columns(self, num_rows: int) -> None:
        """Make sure that there is a cell for each row after `num_rows` more entries."""
        lacking = len(self.rows) + num_rows - len(self.books[Tier.HOST].column)
        if lacking > 0:
            for tier in self.books:
                self.columns[tier].extend(array("i", [_NO_PAGE]) * max(lacking, _ROWS_AT_ONCE))
