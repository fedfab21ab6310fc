"""Giving up all pages of a space at once."""

from __future__ import annotations

from kvhoist.control.directory_events import Subscribers
from kvhoist.control.directory_table import EntryTable
from kvhoist.control.entry import Space
from kvhoist.control.history import History, What
from kvhoist.control.tiers import DOOMED, HELD, PINS, PINS_ANY, READY, Tier


def clear_space(space: Space, table: EntryTable, history: History, subscribers: Subscribers) -> int:
    """Take all entries out of the space's index and give up what is neither pinned nor being filled. What is, is
    doomed: cut off from its path and found by nobody, it stays until its owner lets it go. Returns how many page ids
    of DEVICE and HOST are free again."""
    entries = [table.rows[row] for shard in space.shards for row in shard.values()]
    for entry in entries:
        entry.busy &= PINS_ANY
        entry.flags |= DOOMED
        entry.parent = None
    space.clear_index()
    num_freed = 0
    told: list[tuple[Tier, list[bytes]]] = []
    for tier, book in table.books.items():
        held = [entry for entry in entries if entry.flags & HELD[tier]]
        ready = [entry for entry in held if entry.flags & READY[tier]]
        free = [entry for entry in ready if not entry.busy & PINS[tier]]
        book.ids.free([table.release(entry, book) for entry in free])
        book.policy.removed(ready)
        num_freed += len(free) if tier is not Tier.STORAGE else 0
        told.append((tier, [entry.key for entry in ready]))
    for entry in entries:
        table.prune(entry)
    for tier, keys in told:
        if keys:
            history.note(What.CLEARED, space.serial, tier, keys, "")
            if subscribers:
                subscribers.tell("removed", tier, space, keys)
    return num_freed
