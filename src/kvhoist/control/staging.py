"""The host tier as staging only: a page is given up there as soon as storage has it and nobody needs it there."""

from __future__ import annotations

from collections.abc import Sequence

from kvhoist.control.directory import Directory
from kvhoist.control.entry import Entry
from kvhoist.control.eviction.base import Peeler
from kvhoist.control.tiers import READY, Tier
from kvhoist.errors import ConfigError

_REASON = "storage has it, and the host tier keeps nothing (host_retain=0)"


class Staging:
    """Gives pages up when they have served: persisted, loaded, or come for nobody. Not thread-safe."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def give_up(self, entries: Sequence[Entry]) -> None:
        """Give up those of `entries` that storage has, which are not pinned and have no copy below them, and what of
        their ancestors may go thereby."""
        peeler, stored = Peeler(Tier.HOST), READY[Tier.STORAGE]
        gone: list[Entry] = []
        for entry in reversed(entries):
            leaf: Entry | None = entry
            while leaf is not None and leaf.flags & stored and peeler.is_leaf(leaf):
                gone.append(leaf)
                leaf = peeler.take(leaf)
        if gone:
            self._directory.forget(gone[::-1], Tier.HOST, _REASON)


def check_staging(host_retain: int | None, *, persists: bool) -> None:
    """Raise ConfigError where the host tier is to keep nothing, and no storage takes the pages."""
    if host_retain == 0 and not persists:
        raise ConfigError(
            "with host_retain=0 pages are kept in storage only, and there is none that is written",
            remedy="Give it a store that is not read-only, or leave host_retain out.",
        )
