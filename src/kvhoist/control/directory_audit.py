"""Recounting the directory from scratch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvhoist.control.directory_table import EntryTable, TierBook
from kvhoist.control.entry import SHARD_MASK, Entry, Space
from kvhoist.control.tiers import DOOMED, HELD, HELD_ANY, READY, Tier, num_children, num_pins
from kvhoist.errors import PageIdError


def audit_table(table: EntryTable, spaces: Sequence[Space]) -> None:
    """Raise PageIdError naming the first invariant that does not hold."""
    entries = table.entries()
    _audit_index(table, entries, spaces)
    for tier, book in table.books.items():
        _audit_counts(entries, tier)
        _audit_tier(entries, book)


def _audit_index(table: EntryTable, entries: Sequence[Entry], spaces: Sequence[Space]) -> None:
    indexed = 0
    for space in spaces:
        for number, shard in enumerate(space.shards):
            indexed += len(shard)
            for key, row in shard.items():
                entry = table.rows[row] if row < len(table.rows) else None
                found = entry is not None and entry.key == key and entry.space is space and entry.row == row
                _require(found and key[-1] & SHARD_MASK == number, "the index leads to the wrong row", entry)
    living = [entry for entry in entries if not entry.flags & DOOMED]
    _require(indexed == len(living), "entries are not in the index of their space", f"{indexed} of {len(living)}")
    _require(table.num_entries == len(entries), "free rows and entries do not add up to the rows", table.num_entries)
    for entry in entries:
        parent = entry.parent
        _require(entry.flags & HELD_ANY or entry.busy, "a tombstone leaked: holds nothing, has no descendant", entry)
        _require(parent is None or table.is_current(parent), "an entry outlives its parent", entry)
        _require(parent is None or not (parent.flags | entry.flags) & DOOMED, "a doomed entry is on a path", entry)


def _audit_counts(entries: Sequence[Entry], tier: Tier) -> None:
    children: Counter[Entry] = Counter()
    for entry in entries:
        if not entry.flags & HELD[tier]:
            continue
        node = entry
        while node.parent is not None:
            children[node.parent] += 1
            if children[node.parent] > 1 or node.parent.flags & HELD[tier]:
                break
            node = node.parent
    for entry in entries:
        got = num_children(entry.busy, tier)
        _require(got == children[entry], f"children with copies in {tier} miscounted", f"{entry!r}: {got}")
        pins, held, ready = num_pins(entry.busy, tier), entry.flags & HELD[tier], entry.flags & READY[tier]
        _require(held or not (pins or ready), f"a page is pinned or ready in {tier} without a copy there", entry)
        _require(not held or ready or pins == 1, f"a copy being filled in {tier} has not exactly its pin", entry)


def _audit_tier(entries: Sequence[Entry], book: TierBook) -> None:
    tier = book.tier
    held = [entry for entry in entries if entry.flags & HELD[tier]]
    book.ids.audit([book.column[entry.row] for entry in held])
    num_filling = sum(not entry.flags & READY[tier] for entry in held)
    _require(num_filling == book.num_filling, f"pages being filled in {tier} miscounted", book.num_filling)
    problems = book.policy.problems([e for e in held if e.flags & READY[tier] and not e.flags & DOOMED])
    _require(not problems, f"the eviction policy of {tier} is inconsistent", "; ".join(problems[:4]))


def _require(holds: object, what: str, got: object) -> None:
    if not holds:
        raise PageIdError(what, got=got, remedy="This is a bug in kvhoist: please report it.")
