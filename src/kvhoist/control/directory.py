"""Which pages there are, in which tiers, and which of them go when room is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvhoist.control.directory_audit import audit_table
from kvhoist.control.directory_clear import clear_space
from kvhoist.control.directory_core import DirectoryCore, nonsense, not_a_chain, wrong_state
from kvhoist.control.directory_events import Callback, Event, by_space
from kvhoist.control.directory_stats import DirectoryStats, directory_stats
from kvhoist.control.entry import Entry, Space
from kvhoist.control.eviction.base import is_leaf
from kvhoist.control.explain import Explanation, explain_keys
from kvhoist.control.history import What
from kvhoist.control.namespace import Namespace
from kvhoist.control.tiers import BUSY, CHILD, DOOMED, HELD, PIN, PINS, READY, READY_ANY, Tier
from kvhoist.errors import ConfigError

__all__ = ["Directory", "Entry", "Event", "Space"]


class Directory(DirectoryCore):
    """The pages of all spaces. Single-threaded, the caller serialises; nothing here blocks.

    `capacities` gives the pages of HOST, of DEVICE where it is owned, and of STORAGE the number of hints remembered
    (default: twice the host's pages, at least 65,536; the least recently used are forgotten without a word).
    `eviction` names a policy or makes one (PolicyContext → EvictionPolicy) for DEVICE and HOST; hints go by `lru`.
    `clock` is the wall clock of `explain`, which remembers what became of the last `history_pages` pages.
    `keys` are always chain hashes in order. Lists of entries are pages of a path, first page first.

    A method that raises PageIdError for one of several entries has done those before it, unless it says otherwise.
    Raises PolicyError for an unknown policy, ConfigError for capacities that cannot be.
    """

    # -- reading -------------------------------------------------------------------------------------------------

    def space(self, namespace: Namespace, group: int = 0) -> Space:
        """Return the space of a namespace and cache group, always the same object."""
        name = (namespace.digest, group)
        space = self._spaces.get(name)
        if space is None:
            space = Space(namespace, group, next(self._serials), self._table.columns)
            self._spaces[name] = space
        return space

    def owns(self, space: Space) -> bool:
        """Tell whether `space` is one of this directory's: another's rows would lead to other pages here."""
        return self._spaces.get((space.namespace.digest, space.group)) is space

    @property
    def telling(self) -> bool:
        """Whether a subscriber is being called, in the middle of a change."""
        return self._subscribers.telling

    def find(self, space: Space, key: bytes) -> Entry | None:
        """Return the entry of `key`, whatever it holds, None where there is none."""
        return self._table.entry(space, key)

    def match(self, space: Space, keys: Sequence[bytes]) -> list[Entry]:
        """Return the longest prefix of `keys` in which each page is ready in DEVICE or HOST, or hinted in STORAGE."""
        known = space.num_known(keys, len(keys), len(keys))
        entry = self._table.entry(space, keys[known - 1]) if known else None
        path: list[Entry] = []
        num_unusable = 0
        append, ready = path.append, READY_ANY
        while entry is not None:
            append(entry)
            if not entry.flags & ready:
                num_unusable = len(path)
            entry = entry.parent
        if len(path) != known:
            raise not_a_chain()
        path.reverse()
        return path[: known - num_unusable] if num_unusable else path

    def victims(self, tier: Tier, num_pages: int) -> list[Entry]:
        """Return what `evict` would take, in order, without taking it. Raises PolicyError as it does."""
        book = self._book(tier)
        victims = list(book.policy.choose(max(num_pages, 0)))[:num_pages]
        for victim in victims:
            if type(victim) is not Entry or not self._table.is_current(victim) or not victim.is_ready(tier):
                raise nonsense(book, victim)
            if is_leaf(victim, tier):
                book.policy.exposed(victim)
        return victims

    # -- pins and hits -------------------------------------------------------------------------------------------

    def pin(self, entries: Sequence[Entry], tier: Tier) -> None:
        """Keep the ready copies of `entries` in `tier`, and of all their ancestors, from eviction until unpinned as
        often. Raises PageIdError, having pinned none, where a copy is not ready."""
        pin, ready = PIN[tier], READY[tier]
        for entry in entries:
            if not entry.flags & ready:
                self.unpin(entries[: _index_of(entry, entries)], tier)
                raise wrong_state("pinned", entry, tier, f"a page that is ready in {tier}", "Pin what match returned.")
            entry.busy += pin

    def unpin(self, entries: Sequence[Entry], tier: Tier) -> None:
        """Take back one pin each. Raises PageIdError for a copy that is not pinned, or is being filled."""
        pin, pins, busy_bits, ready = PIN[tier], PINS[tier], BUSY[tier], READY[tier]
        for entry in entries:
            busy = entry.busy
            if not busy & pins or not entry.flags & ready:
                raise wrong_state(
                    "unpinned", entry, tier, f"a page that is pinned in {tier}", "Unpin once for each pin."
                )
            busy -= pin
            entry.busy = busy
            if not busy or not busy & busy_bits:
                self._released(entry, tier)

    def touch(self, entries: Sequence[Entry]) -> None:
        """Record a hit of each of `entries`: they are used later than all else, in every tier."""
        self._stamp = stamp = self._stamp + 1
        for entry in entries:
            entry.stamp = stamp
        for book in self._books.values():
            book.policy.touched(entries)

    # -- filling -------------------------------------------------------------------------------------------------

    def reserve(
        self, space: Space, keys: Sequence[bytes], start: int, stop: int, tier: Tier, *, for_whom: str = ""
    ) -> list[Entry]:
        """Start to fill those of keys[start:stop] that have no copy in `tier`, filling or ready. `keys` is the chain
        from the first page on. Evicts leaves as needed, never a page of this chain, and tells the history `for_whom`.

        Returns their entries in order, each pinned once in `tier` until `publish` or `fail`; fewer, the first ones,
        where there is no room for all. Pages of keys[:start] need no copy anywhere. Raises ConfigError for a range
        outside of `keys`, PolicyError when an outside policy fails; then nothing is reserved.
        """
        if not 0 <= start <= stop <= len(keys):
            raise ConfigError("a range outside of the keys", got=f"{start}:{stop}", expected=f"within 0:{len(keys)}")
        book = self._book(tier)
        known, tip, lacking = self._survey(space, keys, start, stop, tier)
        num_wanted = len(lacking) + stop - max(known, start)
        if not num_wanted:
            return []
        if book.admits:
            book.policy.admit(space, [entry.key for entry in lacking] + list(keys[max(known, start) : stop]))
        num_free = book.ids.num_free
        pages: list[int] = []
        if num_free < num_wanted:
            pages = self._make_room(book, num_wanted - num_free, tip, for_whom)
            if not self._still_there(tip):
                known, tip, lacking = self._survey(space, keys, start, stop, tier)
        if num_free:
            pages += book.ids.allocate(min(num_wanted - len(pages), num_free))
        num_pages = len(pages)
        entries = lacking[:num_pages]
        for entry, page in zip(entries, pages, strict=False):
            self._table.hold(entry, page, book)
        num_new = num_pages - len(entries)
        if num_new:
            new_keys = keys[known : max(known, start) + num_new]
            entries += self._table.create(space, tip, new_keys, pages[-num_new:], book, self._stamp)
        book.num_filling += num_pages
        book.num_no_room += num_wanted - num_pages
        return entries

    def publish(self, entries: Sequence[Entry], tier: Tier) -> list[Entry]:
        """Make copies that were being filled ready, and take the reservation's pin back. Returns those now ready: one
        whose space was cleared meanwhile vanishes instead. Raises PageIdError for a copy that is not being filled."""
        book = self._book(tier)
        held, ready, pin, child, busy_bits = HELD[tier], READY[tier], PIN[tier], CHILD[tier], BUSY[tier]
        held_and_ready, state_bits = held | ready, held | ready | DOOMED
        self._stamp = stamp = self._stamp + 1
        published: list[Entry] = []
        leaves: list[Entry] = []
        doomed: list[Entry] = []
        wrong: Entry | None = None
        append = published.append
        for entry in entries:
            flags = entry.flags
            if flags == held:
                entry.flags = held_and_ready
            elif flags & state_bits == held:
                entry.flags = flags | ready
            elif flags & state_bits == held | DOOMED:
                doomed.append(entry)
                continue
            else:
                wrong = entry
                break
            entry.busy = busy = entry.busy - pin
            entry.stamp = stamp
            append(entry)
            if busy != child and not busy & busy_bits:
                leaves.append(entry)
        book.policy.inserted(published)
        for leaf in leaves:
            book.policy.exposed(leaf)
        self._unreserve(doomed, book)
        book.num_filling -= len(published)
        book.num_stored += len(published)
        if self._subscribers:
            for space, keys in by_space(published):
                self._subscribers.tell("stored", tier, space, keys)
        if wrong is not None:
            raise wrong_state("published", wrong, tier, f"a page being filled in {tier}", "Publish once.")
        return published

    def complete_cleared(self, entries: Sequence[Entry], tier: Tier) -> list[Entry]:
        """Complete those of `entries` whose space was cleared while they were filled, for owners who wait for them.
        Found by nobody, still pinned once by the reservation, they vanish with the last pin. Returns them."""
        cleared = [entry for entry in entries if entry.flags & DOOMED and entry.is_filling(tier)]
        for entry in cleared:
            entry.flags |= READY[tier]
        self._book(tier).num_filling -= len(cleared)
        return cleared

    def fail(self, entries: Sequence[Entry], tier: Tier, reason: str) -> None:
        """Give up copies that were being filled: never visible, their pages free again; `explain` tells the reason.
        Raises PageIdError, having done all others, for a copy that is not being filled."""
        book = self._book(tier)
        filling = list({entry: None for entry in entries if entry.is_filling(tier)})
        self._unreserve(filling, book)
        book.num_failed += len(filling)
        for space, keys in by_space(filling):
            self._history.note(What.FAILED, space.serial, tier, keys, reason)
        if len(filling) < len(entries):
            wrong = next((entry for entry in entries if entry not in set(filling)), entries[-1])
            raise wrong_state("failed", wrong, tier, f"a page being filled in {tier}", "Fail or publish, once.")

    def set_stored(
        self, space: Space, keys: Sequence[bytes], stored: bool, reason: str = "", *, start: int | None = None
    ) -> int:
        """Hint that storage holds pages, or no longer does. Returns how many hints changed.

        Without `start`, `keys` are any pages; those without an entry are ignored. With it, `keys` is the chain from
        the first page on, keys[start:] are meant, and entries are made as needed.
        """
        if not stored:
            return self._unhint(space, keys[start or 0 :], reason)
        if start is None:
            return len(self.publish(self._hint(space, keys), Tier.STORAGE))
        return len(self.publish(self.reserve(space, keys, start, len(keys), Tier.STORAGE), Tier.STORAGE))

    # -- giving up -----------------------------------------------------------------------------------------------

    def evict(self, tier: Tier, num_pages: int, *, for_whom: str = "") -> list[tuple[bytes, int]]:
        """Evict up to `num_pages` leaves, in the policy's order, and return their keys and the page ids now free; fewer
        where the rest is pinned or being filled. Raises PolicyError when an outside policy fails."""
        book = self._book(tier)
        evicted: list[tuple[bytes, int]] = []
        while num_pages > len(evicted):
            gone, pages = self._evict(book, num_pages - len(evicted), for_whom)
            if not gone:
                break
            book.ids.free(pages)
            evicted += zip([entry.key for entry in gone], pages, strict=True)
        return evicted

    def forget(self, entries: Sequence[Entry], tier: Tier, reason: str = "given up by its owner") -> None:
        """Give up the copies of exactly these pages. Raises PageIdError, having given up none, unless all are ready and
        not pinned, and every page below one of them that has a copy in `tier` is among them too, after it."""
        book = self._book(tier)
        self._check_closed(entries, tier)
        self._drop(entries, book, What.DROPPED, reason)

    def clear(self, space: Space | None = None) -> int:
        """Give up all of one space, or of all: its pages are not found from now on. Copies that are pinned or being
        filled keep their page ids until the last pin or the filling ends, and vanish then. Returns the number of page
        ids of DEVICE and HOST that are free again at once. Takes about a µs a page."""
        spaces = list(self._spaces.values()) if space is None else [space]
        return sum(clear_space(one, self._table, self._history, self._subscribers) for one in spaces)

    def drop_space(self, space: Space) -> int:
        """Clear a space whose namespace will not come back, and forget the space: it is this directory's no more."""
        num_pages = self.clear(space)
        self._spaces.pop((space.namespace.digest, space.group), None)
        return num_pages

    # -- telling -------------------------------------------------------------------------------------------------

    def note_skipped(self, space: Space, keys: Sequence[bytes], reason: str) -> None:
        """Remember for `explain` that pages were not stored on purpose."""
        self._history.note(What.SKIPPED, space.serial, Tier.HOST, keys, reason)

    def explain(self, space: Space, keys: Sequence[bytes], num_tokens: int, page_tokens: int) -> Explanation:
        """Say which tiers hold each page of `keys`, and why the first that none holds is a miss."""
        others = [other for other in self._spaces.values() if other is not space and other.group == space.group]
        return explain_keys(space, others, self._table, self._history, keys, num_tokens, page_tokens)

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` with each Event from now on, once a call and space. Returns a function that ends this."""
        return self._subscribers.add(callback)

    def stats(self) -> DirectoryStats:
        return directory_stats(self._table, list(self._spaces.values()), self._history, self._subscribers)

    def audit(self) -> None:
        """Recount everything from scratch. Raises PageIdError naming what does not add up. Takes seconds a million."""
        audit_table(self._table, list(self._spaces.values()))


def _index_of(wanted: Entry, entries: Sequence[Entry]) -> int:
    return next(i for i, entry in enumerate(entries) if entry is wanted)
