"""What became of pages that are not there, for `explain`: bounded, and cheap to write.

Pages that left in one call share one record of atoms, which the garbage collector stops looking at. Their keys are
joined to one bytes object: a page's key is freed with the page, in one piece of memory then, and not one by one much
later, each where no cache has it any more. Reading scans.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

from kvhoist.control.tiers import Tier
from kvhoist.errors import ConfigError

_Record = tuple[int, int, str, float, str, int, bytes]


class What(StrEnum):
    """What happened to a page."""

    EVICTED = "evicted"
    FAILED = "failed"
    SKIPPED = "skipped"
    CLEARED = "cleared"
    DROPPED = "dropped"


class Happened(NamedTuple):
    """`text` is for whom a page was evicted, or why it failed, was skipped, or dropped. `when` is the wall clock's."""

    what: What
    tier: Tier
    when: float
    text: str


class History:
    """The last things that happened, for about `max_pages` pages; 0 keeps none."""

    def __init__(self, max_pages: int, clock: Callable[[], float] = time.time) -> None:
        if not isinstance(max_pages, int) or isinstance(max_pages, bool) or max_pages < 0:
            raise ConfigError(
                "history_pages is not a number of pages", got=repr(max_pages), expected="an int from 0 on"
            )
        self.max_pages = max_pages
        self._clock = clock
        self._records: deque[_Record] = deque()
        self._num_pages = 0

    @property
    def num_pages(self) -> int:
        return self._num_pages

    def note(self, what: What, space: int, tier: Tier, keys: Sequence[bytes], text: str) -> None:
        """Remember what happened now to `keys`, all of one length, of the space with this serial number."""
        if not self.max_pages or not keys:
            return
        kept = keys if len(keys) <= self.max_pages else keys[-self.max_pages :]
        self._records.append((space, int(tier), what.value, self._clock(), text, len(kept), b"".join(kept)))
        self._num_pages += len(kept)
        while self._num_pages > self.max_pages:
            self._num_pages -= self._records.popleft()[5]

    def trail(self, space: int, key: bytes) -> list[Happened]:
        """Return the last thing that happened to a page in each tier, latest first; none if it is too long ago."""
        found: dict[int, Happened] = {}
        for serial, tier, what, when, text, num_keys, keys in reversed(self._records):
            if serial == space and tier not in found and _is_among(key, keys, num_keys):
                found[tier] = Happened(What(what), Tier(tier), when, text)
        return list(found.values())


def _is_among(key: bytes, keys: bytes, num_keys: int) -> bool:
    """Tell whether `key` is one of the `num_keys` keys of one length that were joined to `keys`."""
    length = len(keys) // num_keys
    at = keys.find(key)
    while at % length and at >= 0:
        at = keys.find(key, at + 1)
    return at >= 0 and len(key) == length
