"""Giving up all pages of a space at once."""

from __future__ import annotations

from kvhoist.control.directory_events import Subscribers
from kvhoist.control.directory_table import EntryTable
from kvhoist.control.entry import Entry, Space
from kvhoist.control.history import History, What
from kvhoist.control.tiers import DOOMED, HELD, PINS, PINS_ANY, READY, Tier


def clear_space(space: Space, table: EntryTable, history: History, subscribers: Subscribers) -> int:
    """Take all entries out of the space's index and give up what is neither pinned nor being filled. What is, is
    doomed: cut off from its path and found by nobody, it stays until its owner lets it go. Returns how many page ids
    of DEVICE and HOST are free again."""
    entries = [table.rows[row] for shard in space.shards for row in shard.values()]
    space.clear_index()
    gone: dict[Tier, list[Entry]] = {tier: [] for tier in table.books}
    pages: dict[Tier, list[int]] = {tier: [] for tier in table.books}
    ledgers = [(HELD[t], gone[t].append, pages[t].append, book.column) for t, book in table.books.items()]
    doomed: list[Entry] = []
    for entry in entries:
        flags = entry.flags
        entry.parent = None
        if entry.busy & PINS_ANY:
            doomed.append(entry)
            continue
        for held, note, free, column in ledgers:
            if flags & held:
                note(entry)
                free(column[entry.row])
        entry.flags = entry.busy = 0
        table.spare(entry)
    for entry in doomed:
        _doom(entry, table, gone, pages)
    for tier, book in table.books.items():
        book.ids.free(pages[tier])
        book.policy.removed(gone[tier])
    for tier, left in gone.items():
        if left:
            keys = [entry.key for entry in left]
            history.note(What.CLEARED, space.serial, tier, keys, "")
            if subscribers:
                subscribers.tell("removed", tier, space, keys)
    return sum(len(freed) for tier, freed in pages.items() if tier is not Tier.STORAGE)


def _doom(entry: Entry, table: EntryTable, gone: dict[Tier, list[Entry]], pages: dict[Tier, list[int]]) -> None:
    """Leave to `entry` only what is pinned or being filled. `gone` gets it where it was ready, pinned or not."""
    entry.busy &= PINS_ANY
    entry.flags |= DOOMED
    for tier, book in table.books.items():
        if entry.flags & READY[tier]:
            gone[tier].append(entry)
            if not entry.busy & PINS[tier]:
                pages[tier].append(table.release(entry, book))
