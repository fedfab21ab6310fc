"""What an eviction policy is told, and what it answers. Outside code can bring its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvhoist.control.entry import Entry, Space
from kvhoist.control.tiers import BUSY, CHILD, HELD, READY, Tier, num_children


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy is made for: one tier of `num_pages` pages. `rows[entry.row]` is the entry of a row, removed or
    not; the directory's own list, to be read only."""

    tier: Tier
    num_pages: int
    rows: Sequence[Entry]


class EvictionPolicy(Protocol):
    """Ranks the ready pages of one tier; a subclass gets harmless defaults for what it does not care about.

    The directory decides what may go: a *leaf* is a ready page that is not pinned and has no copy below it in the tier.
    Every answer is checked before it is acted upon. Lists of entries are in the order of the caller's pages, first
    page first. Hooks must not raise and must not call the directory.
    """

    def admit(self, space: Space, keys: Sequence[bytes]) -> None:
        """Pages of `keys` are about to be reserved; room is made after this."""

    def inserted(self, entries: Sequence[Entry]) -> None:
        """Pages became ready in this tier."""

    def touched(self, entries: Sequence[Entry]) -> None:
        """Pages were hit, in whatever tier; some may have no copy in this one."""

    def removed(self, entries: Sequence[Entry]) -> None:
        """Ready copies have left this tier, by eviction or otherwise."""

    def exposed(self, entry: Entry) -> None:
        """A ready page has become a leaf (or may have been named by `choose` and was not taken)."""

    def problems(self, ready: Collection[Entry]) -> list[str]:
        """Return what is inconsistent, given all ready pages of the tier. For `Directory.audit`."""
        return []

    def choose(self, num_pages: int) -> list[Entry]:
        """Return up to `num_pages` victims in order: each a leaf once those before it are gone. They are evicted, or
        only shown, in which case each that is a leaf is given back by `exposed`."""
        ...


EvictionFactory = Callable[[PolicyContext], EvictionPolicy]


def is_leaf(entry: Entry, tier: Tier) -> bool:
    """Tell whether `entry` may be evicted from `tier` now: ready, not pinned, no copy below it there."""
    return entry.flags & READY[tier] != 0 and entry.busy & BUSY[tier] == 0


class Peeler:
    """Takes leaves off a tier in thought: what would be a leaf if those taken were gone."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._lost: dict[Entry, int] = {}
        self._taken: set[Entry] = set()

    def is_leaf(self, entry: Entry) -> bool:
        lost = self._lost.get(entry, 0) * CHILD[self._tier]
        ready = entry.flags & READY[self._tier] != 0
        return ready and entry not in self._taken and entry.busy & BUSY[self._tier] == lost

    def take(self, entry: Entry) -> Entry | None:
        """Take a leaf; return the ancestor that thereby became one, if any."""
        tier = self._tier
        self._taken.add(entry)
        parent = entry.parent
        while parent is not None:
            lost = self._lost[parent] = self._lost.get(parent, 0) + 1
            if parent.flags & HELD[tier]:
                return parent if self.is_leaf(parent) else None
            if num_children(parent.busy, tier) > lost:
                return None
            parent = parent.parent
        return None
