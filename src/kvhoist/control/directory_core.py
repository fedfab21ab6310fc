"""What the directory's acts share: surveying a chain, making room, giving copies up, and telling who must know."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from kvhoist.control.directory_events import Subscribers, by_space
from kvhoist.control.directory_table import EntryTable, TierBook
from kvhoist.control.entry import Entry, Space
from kvhoist.control.eviction import EvictionFactory, PolicyContext, eviction_factory
from kvhoist.control.eviction.base import is_leaf
from kvhoist.control.history import History, What
from kvhoist.control.page_ids import MAX_PAGES, PageIds
from kvhoist.control.tiers import BUSY, CHILD, DOOMED, HELD, PIN, READY, Tier
from kvhoist.errors import ConfigError, PageIdError, PolicyError

_FEWEST_HINTS = 1 << 16


class DirectoryCore:
    """The state of a Directory and the steps of its methods. `directory.Directory` is the class to use."""

    def __init__(
        self,
        capacities: Mapping[Tier, int],
        *,
        eviction: str | EvictionFactory = "lru",
        clock: Callable[[], float] = time.time,
        history_pages: int = 65536,
    ) -> None:
        if Tier.HOST not in capacities or not set(capacities) <= set(Tier):
            raise ConfigError(
                "these are not the tiers of a directory",
                got=[str(tier) for tier in capacities],
                expected="the pages of HOST, and maybe of DEVICE and STORAGE",
            )
        factory = eviction_factory(eviction)
        self._table = EntryTable()
        self._books = self._table.books
        for tier, num_pages in capacities.items():
            self._add_tier(tier, num_pages, eviction_factory("lru") if tier is Tier.STORAGE else factory)
        if Tier.STORAGE not in capacities:
            num_hints = min(max(2 * capacities[Tier.HOST], _FEWEST_HINTS), MAX_PAGES)
            self._add_tier(Tier.STORAGE, num_hints, eviction_factory("lru"))
        self._spaces: dict[tuple[bytes, int], Space] = {}
        self._serials = itertools.count()
        self._stamp = 0
        self._history = History(history_pages, clock)
        self._subscribers = Subscribers()

    def _add_tier(self, tier: Tier, num_pages: int, factory: EvictionFactory) -> None:
        ids = PageIds(num_pages)
        policy = factory(PolicyContext(tier, num_pages, self._table.rows))
        self._books[tier] = TierBook(tier, ids, self._table.columns[tier], policy)

    def _book(self, tier: Tier) -> TierBook:
        book = self._books.get(tier)
        if book is None:
            raise ConfigError(
                f"this directory does not own the tier {tier}",
                choices=self._books,
                remedy="Give it a capacity, or leave that tier to its owner.",
            )
        return book

    def num_free(self, tier: Tier) -> int:
        """Return how many pages of a tier are free. Raises ConfigError for a tier that is not owned."""
        return self._book(tier).ids.num_free

    def chain(self, space: Space, keys: Sequence[bytes], start: int, stop: int) -> list[Entry]:
        """Return the entries of keys[start:stop], whatever they hold, as far as there are any. Raises PageIdError for
        keys that are no chain."""
        known = space.num_known(keys, stop, stop)
        return _last_of_path(self._table.entry(space, keys[known - 1]), known - start) if known > start else []

    def drop_hints(self, most_pages: int, reason: str) -> int:
        """Forget up to `most_pages` pages of what storage was known to hold, and return how many: 0 where none is left.
        Takes about a µs a page."""
        book = self._books[Tier.STORAGE]
        hinted = list(reversed(book.policy.choose(most_pages)))
        self._drop(hinted, book, What.DROPPED, reason)
        return len(hinted)

    def note_unstored(self, space: Space, keys: Sequence[bytes], reason: str) -> None:
        """Remember for `explain` that pages did not reach storage."""
        self._history.note(What.FAILED, space.serial, Tier.STORAGE, keys, reason)

    def _survey(
        self, space: Space, keys: Sequence[bytes], start: int, stop: int, tier: Tier
    ) -> tuple[int, Entry | None, list[Entry]]:
        """Return how many of keys[:stop] have entries, the last of these, and those from `start` on without a copy."""
        known = space.num_known(keys, stop, start)
        tip = self._table.entry(space, keys[known - 1]) if known else None
        held = HELD[tier]
        lacking = [entry for entry in _last_of_path(tip, known - start) if not entry.flags & held]
        return known, tip, lacking

    def _still_there(self, tip: Entry | None) -> bool:
        """Tell whether a chain surveyed before is as it was: the last entry, if there was one, holds all before it."""
        return tip is None or self._table.is_current(tip)

    def _make_room(self, book: TierBook, num_pages: int, tip: Entry | None, for_whom: str) -> list[int]:
        """Evict up to `num_pages`, but neither `tip` nor any page above it. Returns their page ids, still held."""
        held, pin = HELD[book.tier], PIN[book.tier]
        while tip is not None and not tip.flags & held:
            tip = tip.parent
        if tip is not None:
            tip.busy += pin
        pages: list[int] = []
        try:
            while len(pages) < num_pages and (more := self._evict(book, num_pages - len(pages), for_whom)[1]):
                pages += more
        except PolicyError:
            book.ids.free(pages)
            raise
        finally:
            if tip is not None:
                tip.busy -= pin
                if is_leaf(tip, book.tier):
                    book.policy.exposed(tip)
        return pages

    def _evict(self, book: TierBook, num_pages: int, for_whom: str) -> tuple[list[Entry], list[int]]:
        """Evict up to `num_pages` of the policy's choice. Returns them and their page ids, still held."""
        victims = book.policy.choose(num_pages)
        if len(victims) > num_pages:
            victims = victims[:num_pages]
        pages = self._table.evict(victims, book)
        gone = victims if len(victims) == len(pages) else victims[: len(pages)]
        book.num_evicted += len(pages)
        book.policy.removed(gone)
        if book.tier is not Tier.STORAGE:
            self._note_gone(gone, book.tier, What.EVICTED, for_whom)
        if gone is not victims:
            book.ids.free(pages)
            raise nonsense(book, victims[len(pages)])
        return gone, pages

    def _drop(self, entries: Sequence[Entry], book: TierBook, what: What, reason: str) -> None:
        """Give up ready copies, deepest first, in whatever state the pages below them are."""
        pages = [self._table.drop(entry, book) for entry in reversed(entries)]
        book.ids.free(pages)
        book.policy.removed(entries)
        self._note_gone(entries, book.tier, what, reason)

    def _note_gone(self, entries: Sequence[Entry], tier: Tier, what: What, text: str) -> None:
        for space, keys in by_space(entries):
            self._history.note(what, space.serial, tier, keys, text)
            if self._subscribers:
                self._subscribers.tell("removed", tier, space, keys)

    def _unreserve(self, filling: Sequence[Entry], book: TierBook) -> None:
        """Take the reservations of copies being filled back: the copies, their pins and their pages."""
        pages: list[int] = []
        for entry in reversed(filling):
            entry.busy -= PIN[book.tier]
            pages.append(self._table.drop(entry, book))
        book.ids.free(pages)
        book.num_filling -= len(filling)

    def _released(self, entry: Entry, tier: Tier) -> None:
        """The last pin of a ready copy that has none below it is gone."""
        book = self._books[tier]
        if entry.flags & DOOMED:
            book.ids.free([self._table.drop(entry, book)])
        else:
            book.policy.exposed(entry)

    def _hint(self, space: Space, keys: Sequence[bytes]) -> list[Entry]:
        """Reserve hints for those of `keys` that have an entry without one."""
        book = self._books[Tier.STORAGE]
        lacking = self._without_hint(space, keys)
        if book.ids.num_free < len(lacking):
            book.ids.free(self._make_room(book, len(lacking) - book.ids.num_free, None, ""))
            lacking = self._without_hint(space, keys)
        del lacking[book.ids.num_free :]
        for entry, number in zip(lacking, book.ids.allocate(len(lacking)), strict=True):
            self._table.hold(entry, number, book)
        book.num_filling += len(lacking)
        return lacking

    def _without_hint(self, space: Space, keys: Sequence[bytes]) -> list[Entry]:
        found = [self._table.entry(space, key) for key in keys]
        return list(dict.fromkeys(e for e in found if e is not None and not e.flags & HELD[Tier.STORAGE]))

    def _unhint(self, space: Space, keys: Sequence[bytes], reason: str) -> int:
        found = [self._table.entry(space, key) for key in keys]
        hinted = list(dict.fromkeys(e for e in found if e is not None and e.flags & READY[Tier.STORAGE]))
        self._drop(hinted, self._books[Tier.STORAGE], What.DROPPED, reason)
        return len(hinted)

    def _check_closed(self, entries: Sequence[Entry], tier: Tier) -> None:
        """Raise PageIdError unless each of `entries` would be a leaf of `tier` once those after it are gone."""
        lost: dict[Entry, int] = {}
        child = CHILD[tier]
        for entry in reversed(entries):
            if not entry.flags & READY[tier] or entry.busy & BUSY[tier] != lost.get(entry, 0) * child:
                raise wrong_state(
                    "forgotten", entry, tier, "ready, unpinned pages and all pages below them", "Give them in order."
                )
            parent = entry.parent
            while parent is not None:
                lost[parent] = lost.get(parent, 0) + 1
                if parent.flags & HELD[tier] or parent.busy & BUSY[tier] != lost[parent] * child:
                    break
                parent = parent.parent


def _last_of_path(tip: Entry | None, num_entries: int) -> list[Entry]:
    """Return the last `num_entries` (none for less than one) of the path that ends in `tip`, in order. Raises
    PageIdError where it has fewer."""
    found: list[Entry] = []
    append, entry = found.append, tip
    for _ in range(num_entries):
        if entry is None:
            raise not_a_chain()
        append(entry)
        entry = entry.parent
    found.reverse()
    return found


def wrong_state(act: str, entry: Entry, tier: Tier, expected: str, remedy: str) -> PageIdError:
    return PageIdError(f"a page in {tier} cannot be {act}", got=repr(entry), expected=expected, remedy=remedy)


def not_a_chain() -> PageIdError:
    return PageIdError(
        "the keys are not one chain",
        expected="chain hashes in order, from the first page on, of which each determines all before it",
    )


def nonsense(book: TierBook, victim: object) -> PolicyError:
    return PolicyError(
        f"the eviction policy {book.policy} chose what may not go",
        got=repr(victim),
        expected=f"a ready page of {book.tier} that is not pinned and has no page below it there",
        remedy="Mend the policy; nothing else was evicted, and the directory is unharmed.",
    )
