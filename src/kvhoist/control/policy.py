"""When a page that the engine computed is copied to the host tier."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from kvhoist.errors import PolicyError


class WriteWhen(StrEnum):
    """The names of the write policies."""

    WRITE_THROUGH = "write_through"  # at once
    WRITE_THROUGH_SELECTIVE = "write_through_selective"  # at once, when a page was hit often enough
    WRITE_BACK = "write_back"  # when the device tier gives it up


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """A write policy; `min_hits` is the number of hits after which `write_through_selective` offloads a page.

    Raises PolicyError for an unknown name, a `min_hits` below 1, or `write_back` where kvhoist does not own the device
    tier: nobody would tell it before a page is overwritten.
    """

    when: WriteWhen
    min_hits: int = 2

    @classmethod
    def parse(cls, name: str, *, min_hits: int = 2, device_owned: bool) -> WritePolicy:
        choices = [when.value for when in WriteWhen if device_owned or when is not WriteWhen.WRITE_BACK]
        if name not in choices:
            foreign = name == WriteWhen.WRITE_BACK.value
            raise PolicyError(
                "write_back needs a device tier that kvhoist owns" if foreign else "no such write policy",
                got=repr(name),
                choices=choices,
                remedy="The engine evicts its own device pages without asking; use write_through." if foreign else None,
            )
        if not isinstance(min_hits, int) or isinstance(min_hits, bool) or min_hits < 1:
            raise PolicyError("min_hits is out of range", got=repr(min_hits), expected="an int from 1 on")
        return cls(WriteWhen(name), min_hits)

    def offloads(self, num_hits: int) -> bool:
        """Tell whether a ready device page with `num_hits` hits is to be offloaded now."""
        if self.when is WriteWhen.WRITE_THROUGH_SELECTIVE:
            return num_hits >= self.min_hits
        return self.when is WriteWhen.WRITE_THROUGH


class HitCounter:
    """Counts hits of page keys, for at most `max_keys` keys: the least recently counted are forgotten."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._hits: OrderedDict[tuple[bytes, int, bytes], int] = OrderedDict()

    def get(self, key: tuple[bytes, int, bytes]) -> int:
        return self._hits.get(key, 0)

    def add(self, key: tuple[bytes, int, bytes]) -> int:
        """Count one hit and return the new count."""
        count = self._hits.pop(key, 0) + 1
        self._hits[key] = count
        if len(self._hits) > self._max_keys:
            self._hits.popitem(last=False)
        return count
