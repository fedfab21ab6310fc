"""Pins that one owner holds on pages of several tiers, given back together."""

from __future__ import annotations

from collections.abc import Sequence

from kvhoist.control.directory import Directory
from kvhoist.control.entry import Entry
from kvhoist.control.staging import Staging
from kvhoist.control.tiers import Tier


class Pins:
    """Pins held on behalf of one owner, at most one a page and tier, given back together. Not thread-safe.

    `release` is idempotent, and final: what is added later is not pinned. Where the host tier is `staging` only, pages
    may go with it.
    """

    def __init__(self, directory: Directory, staging: Staging | None = None) -> None:
        self._directory = directory
        self._staging = staging
        self._held: dict[Tier, dict[Entry, None]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        self._released = False

    def add(self, entries: Sequence[Entry], tier: Tier) -> None:
        held = self._held[tier]
        new = [] if self._released else [entry for entry in entries if entry not in held]
        if new:
            self._directory.pin(new, tier)
            held.update(dict.fromkeys(new))

    def release(self, tiers: Sequence[Tier] = (Tier.DEVICE, Tier.HOST)) -> None:
        """Give the pins of `tiers` back; after all of them, nothing is taken any more."""
        self._released = self._released or len(tiers) == len(self._held)
        for tier in tiers:
            held, self._held[tier] = self._held[tier], {}
            if held:
                self._directory.unpin(list(held), tier)
                if tier is Tier.HOST and self._staging is not None:
                    self._staging.give_up(list(held))
