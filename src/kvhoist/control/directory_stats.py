"""The directory in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvhoist.control.directory_events import Subscribers
from kvhoist.control.directory_table import EntryTable
from kvhoist.control.entry import Space
from kvhoist.control.history import History


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier's pages (of STORAGE: hints). The first four are gauges, the others counted since the start; a
    reservation that was cleared while it was filled counts as neither stored nor failed. no_room_pages: those that a
    call wanted to fill and found no room for, since all was pinned, filling or of the same chain; each call counts."""

    capacity_pages: int
    free_pages: int
    ready_pages: int
    filling_pages: int
    stored_pages: int
    evicted_pages: int
    no_room_pages: int
    failed_pages: int


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    """Gauges and counters; `tiers` by name. `entries` are those of all spaces, doomed ones included."""

    tiers: dict[str, TierStats]
    spaces: int
    entries: int
    history_pages: int
    subscriber_errors: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def directory_stats(
    table: EntryTable, spaces: Sequence[Space], history: History, subscribers: Subscribers
) -> DirectoryStats:
    tiers = {
        str(book.tier): TierStats(
            capacity_pages=book.ids.num_pages,
            free_pages=book.ids.num_free,
            ready_pages=book.ids.num_held - book.num_filling,
            filling_pages=book.num_filling,
            stored_pages=book.num_stored,
            evicted_pages=book.num_evicted,
            no_room_pages=book.num_no_room,
            failed_pages=book.num_failed,
        )
        for book in table.books.values()
    }
    return DirectoryStats(tiers, len(spaces), table.num_entries, history.num_pages, subscribers.num_errors)
