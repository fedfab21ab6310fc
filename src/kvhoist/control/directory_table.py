"""The table under the directory: rows of entries, what each tier holds, and the counts of children that follow."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvhoist.control.entry import SHARD_MASK, Entry, Space
from kvhoist.control.eviction.base import EvictionPolicy
from kvhoist.control.page_ids import PageIds
from kvhoist.control.tiers import BUSY, CHILD, CHILDREN, DOOMED, HELD, HELD_ANY, PIN, READY, Tier
from kvhoist.control.untracked import untrack, untrack_one

_FEWEST_NEW_ROWS = 1024
_NO_PAGE = -1


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
    num_failed: int = 0


class EntryTable:
    """Creates and removes entries and keeps these invariants: an entry holds a copy or has a descendant that does;
    `busy` counts, by tier, the children that hold a copy there, themselves or below them."""

    def __init__(self) -> None:
        self.rows: list[Entry | None] = untrack([])
        self.columns: tuple[array[int], ...] = tuple(array("i") for _ in Tier)
        self.books: dict[Tier, TierBook] = {}
        self._free_rows: list[int] = untrack([])

    @property
    def num_entries(self) -> int:
        return len(self.rows) - len(self._free_rows)

    def entry(self, space: Space, key: bytes) -> Entry | None:
        row = space.shards[key[-1] & SHARD_MASK].get(key)
        return None if row is None else self.rows[row]

    def is_current(self, entry: Entry) -> bool:
        """Tell whether `entry` is one of this table's and not removed."""
        row = entry.row
        return row < len(self.rows) and self.rows[row] is entry

    def create(
        self,
        space: Space,
        parent: Entry | None,
        keys: Sequence[bytes],
        pages: Sequence[int],
        book: TierBook,
        stamp: int,
    ) -> list[Entry]:
        """Append entries for the chain `keys` to `parent`; the last len(pages) of them, at least one, are being filled
        in `pages` and pinned once, those before them hold nothing. Returns those being filled."""
        tier, column, rows, shards = book.tier, book.column, self.rows, space.shards
        free_rows = self._take_rows(len(keys))
        held, child, child_and_pin = HELD[tier], CHILD[tier], CHILD[tier] + PIN[tier]
        first_parent = parent
        num_empty = len(keys) - len(pages)
        created: list[Entry] = []
        for key, row in zip(keys, free_rows, strict=True):
            entry = Entry()
            entry.key = key
            entry.parent = parent
            entry.space = space
            entry.stamp = stamp
            entry.row = row
            entry.flags = held
            entry.busy = child_and_pin
            untrack_one(entry)
            rows[row] = parent = entry
            shards[key[-1] & SHARD_MASK][key] = row
            created.append(entry)
        entry.busy = PIN[tier]
        for entry in created[:num_empty]:
            entry.flags = 0
            entry.busy = child
        for row, page in zip(free_rows[num_empty:], pages, strict=True):
            column[row] = page
        self._occupy(first_parent, tier)
        return created[num_empty:]

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
        page = book.column[entry.row]
        book.column[entry.row] = _NO_PAGE
        entry.flags &= ~(HELD[book.tier] | READY[book.tier])
        return page

    def evict(self, victims: Sequence[Entry], book: TierBook, pages: list[int]) -> Entry | None:
        """Drop leaves one after the other and append their page ids to `pages`. Stops at, and returns, what is no
        leaf of this tier, None when all went."""
        tier, column, rows = book.tier, book.column, self.rows
        ready, busy_bits, child, held = READY[tier], BUSY[tier], CHILD[tier], HELD[tier]
        kept_flags = ~(held | ready)
        num_rows, last = len(rows), len(victims) - 1
        for i, entry in enumerate(victims):
            if type(entry) is not Entry or entry.row >= num_rows or rows[entry.row] is not entry:
                return entry
            if not entry.flags & ready or entry.busy & busy_bits:
                return entry
            row = entry.row
            pages.append(column[row])
            column[row] = _NO_PAGE
            flags = entry.flags = entry.flags & kept_flags
            parent = entry.parent
            if parent is not None:
                busy = parent.busy = parent.busy - child
                if not busy & busy_bits:
                    if not parent.flags & held:
                        self.vacate(parent.parent, book)
                    elif i == last or victims[i + 1] is not parent:
                        book.policy.exposed(parent)
            if not flags and not entry.busy:
                self.prune(entry)
        return None

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
            key, row = entry.key, entry.row
            if not entry.flags & DOOMED:
                del entry.space.shards[key[-1] & SHARD_MASK][key]
            self.rows[row] = None
            self._free_rows.append(row)
            entry.parent = None
            entry = parent

    def _occupy(self, parent: Entry | None, tier: Tier) -> None:
        held, children, child = HELD[tier], CHILDREN[tier], CHILD[tier]
        while parent is not None:
            occupied = parent.flags & held or parent.busy & children
            parent.busy += child
            if occupied:
                return
            parent = parent.parent

    def _take_rows(self, num_rows: int) -> list[int]:
        free = self._free_rows
        if len(free) < num_rows:
            num_new = max(num_rows - len(free), _FEWEST_NEW_ROWS)
            first = len(self.rows)
            self.rows.extend([None] * num_new)
            for tier in self.books:
                self.columns[tier].extend(array("i", [_NO_PAGE]) * num_new)
            free.extend(range(first + num_new - 1, first - 1, -1))
        taken = free[-num_rows:]
        del free[-num_rows:]
        taken.reverse()
        return taken
