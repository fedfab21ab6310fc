"""Pages that are offered to the host tier: which of them the write policy wants, and which found no room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvhoist.control.directory import Directory, Space
from kvhoist.control.entry import Entry
from kvhoist.control.paths import runs
from kvhoist.control.policy import HitCounter, WritePolicy, WriteWhen
from kvhoist.control.tiers import HELD, Tier

_MOST_LEFT_OUT = 1 << 16
_MOST_COUNTED = 1 << 18
_NAMED = 4


class Offer(NamedTuple):
    """Ready pages keys[start:stop] of a foreign device, whose blocks are `device_blocks`."""

    keys: Sequence[bytes]
    start: int
    stop: int
    device_blocks: Sequence[int]
    for_whom: str = ""


class Offers:
    """Answers the write policy's questions for one cache group, and reserves host pages for what it wants."""

    def __init__(self, directory: Directory, policy: WritePolicy, blocks_per_page: int) -> None:
        self._directory = directory
        self._policy = policy
        self._blocks_per_page = blocks_per_page
        self._hits = HitCounter(max_keys=_MOST_COUNTED)
        self._left_out: set[bytes] = set()

    def wanted(self, space: Space, keys: Sequence[bytes], start: int, stop: int) -> int:
        """Return up to where the write policy wants keys[start:stop]. Each call is an offer: for
        `write_through_selective`, every further one of the same page is a hit."""
        if self._policy.when is WriteWhen.WRITE_BACK:
            return start
        if self._policy.when is WriteWhen.WRITE_THROUGH:
            return stop
        wanted = start
        digest, group = space.namespace.digest, space.group
        for i in range(start, stop):
            hits = self._hits.add((digest, group, keys[i])) - 1
            if wanted == i and self._policy.offloads(hits):
                wanted = i + 1
        if wanted < stop:
            reason = f"write_through_selective waits for {self._policy.min_hits} hits"
            self._directory.note_skipped(space, keys[wanted:stop], reason)
        return wanted

    def unstored(self, space: Space, offers: Sequence[Offer]) -> list[Offer]:
        """Return the parts of the offers that storage is not known to hold."""
        per_page = self._blocks_per_page
        parts = []
        for offer in offers:
            known = self._directory.chain(space, offer.keys, offer.start, offer.stop)
            stored = {i for i, entry in enumerate(known, offer.start) if entry.is_ready(Tier.STORAGE)}
            lacking = set(range(offer.start, offer.stop)) - stored
            for low, high in runs(offer.start, offer.stop, lacking.__contains__):
                blocks = offer.device_blocks[(low - offer.start) * per_page : (high - offer.start) * per_page]
                parts.append(offer._replace(start=low, stop=high, device_blocks=blocks))
        return parts

    def make_room(self, space: Space, offers: Sequence[Offer]) -> None:
        """Evict in one go what new pages of several offers will need, where page by page costs several times as much.
        Never a page that one of them continues; what is known of an offer's pages already is left to `reserve`."""
        new = [offer for offer in offers if space.row(offer.keys[offer.start]) is None]
        num_lacking = sum(offer.stop - offer.start for offer in new) - self._directory.num_free(Tier.HOST)
        if num_lacking <= 0 or len(new) < 2:
            return
        found = [self._directory.find(space, offer.keys[offer.start - 1]) for offer in new if offer.start]
        tips = [entry for entry in found if entry is not None and entry.is_ready(Tier.HOST)]
        self._directory.pin(tips, Tier.HOST)
        try:
            self._directory.evict(Tier.HOST, num_lacking, for_whom=_names(new))
        finally:
            self._directory.unpin(tips, Tier.HOST)

    def reserve(self, space: Space, offer: Offer) -> tuple[list[Entry], list[int]]:
        """Reserve host pages for those of the offer that lack one; returns them, and the device blocks to read."""
        keys, start, stop, device_blocks, for_whom = offer
        entries = self._directory.reserve(space, keys, start, stop, Tier.HOST, for_whom=for_whom)
        if len(entries) == stop - start:
            return entries, list(device_blocks[: len(entries) * self._blocks_per_page])
        self.note_left_out(space, keys, start, stop)
        if not entries:
            return [], []
        index = {key: i for i, key in enumerate(keys[start:stop])}
        per_page = self._blocks_per_page
        blocks: list[int] = []
        for entry in entries:
            first = index[entry.key] * per_page
            blocks.extend(device_blocks[first : first + per_page])
        return entries, blocks

    def note_left_out(self, space: Space, keys: Sequence[bytes], start: int, stop: int) -> None:
        """Remember those of keys[start:stop] for which the host tier has no page."""
        known, held = self._directory.chain(space, keys, start, stop), HELD[Tier.HOST]
        left = [entry.key for entry in known if not entry.flags & held]
        left += keys[start + len(known) : stop]
        if left:
            reason = "the host tier had no page to give: all are pinned or in flight"
            self._directory.note_skipped(space, left, reason)
            if len(self._left_out) > _MOST_LEFT_OUT:
                self._left_out.clear()
            self._left_out.update(left)

    def take_left_out(self, keys: Sequence[bytes], stop: int) -> list[tuple[int, int]]:
        """Return, as runs, those of keys[:stop] that were left out, and forget them."""
        if not self._left_out:
            return []
        lacking = runs(0, stop, lambda i: keys[i] in self._left_out)
        self._left_out.difference_update(keys[:stop])
        return lacking


def _names(offers: Sequence[Offer]) -> str:
    """Return for whom pages are evicted, the first few by name."""
    names = list(dict.fromkeys(offer.for_whom for offer in offers))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
