"""What the directory tells those who asked: pages stored and removed, by tier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Literal

from kvhoist.control.entry import Entry, Space
from kvhoist.control.tiers import Tier

_LOG = logging.getLogger(__name__)
_BY_SPACE = attrgetter("space")


@dataclass(frozen=True, slots=True)
class Event:
    """Pages of one space became ready in a tier (`stored`) or left it (`removed`). For STORAGE: as far as is known."""

    kind: Literal["stored", "removed"]
    tier: Tier
    namespace: bytes
    group: int
    keys: tuple[bytes, ...]


Callback = Callable[[Event], None]


class Subscribers:
    """Calls each subscriber once a call and space. One that raises is logged and counted, and does no other harm."""

    def __init__(self) -> None:
        self._callbacks: dict[int, Callback] = {}
        self._next = 0
        self.num_errors = 0
        self.telling = False

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def add(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` with each Event from now on. Returns a function that ends this, and may be called twice."""
        number = self._next
        self._next += 1
        self._callbacks[number] = callback

        def unsubscribe() -> None:
            self._callbacks.pop(number, None)

        return unsubscribe

    def tell(self, kind: Literal["stored", "removed"], tier: Tier, space: Space, keys: Sequence[bytes]) -> None:
        event = Event(kind, tier, space.namespace.digest, space.group, tuple(keys))
        for callback in list(self._callbacks.values()):
            self.telling = True
            try:
                callback(event)
            except (Exception, SystemExit):  # a stranger's code: whatever it raises must not reach the scheduler
                self.num_errors += 1
                _LOG.exception("a subscriber of the directory raised on %s in %s", kind, tier)
            finally:
                self.telling = False


def by_space(entries: Sequence[Entry]) -> list[tuple[Space, list[bytes]]]:
    """Return the keys of `entries` in runs of one space."""
    if entries:
        first = entries[0].space
        if not [entry for entry in entries if entry.space is not first]:
            return [(first, [entry.key for entry in entries])]
    return [(space, [entry.key for entry in run]) for space, run in groupby(entries, _BY_SPACE)]
