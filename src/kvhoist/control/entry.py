"""One page identity and the space that it belongs to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvhoist.control.namespace import Namespace
from kvhoist.control.tiers import HELD, READY, Tier

_NUM_SHARDS = 16
SHARD_MASK = _NUM_SHARDS - 1


class Space:
    """The pages of one namespace and cache group: chain hash → row. Made by `Directory.space`, never by hand.

    The index is split by the last bits of the key, because a dict of a million keys that grows stops its caller for 50
    to 100 ms. It holds ints only, hence the garbage collector never visits it.
    """

    __slots__ = ("columns", "group", "namespace", "serial", "shards")

    def __init__(self, namespace: Namespace, group: int, serial: int, columns: tuple[array[int], ...]) -> None:
        self.namespace = namespace
        self.group = group
        self.serial = serial
        self.columns = columns
        self.shards: list[dict[bytes, int]] = [{} for _ in range(_NUM_SHARDS)]

    def __repr__(self) -> str:
        return f"Space({self.namespace.digest.hex()[:16]}, group {self.group}, {self.num_entries} entries)"

    @property
    def num_entries(self) -> int:
        return sum(len(shard) for shard in self.shards)

    def row(self, key: bytes) -> int | None:
        return self.shards[key[-1] & SHARD_MASK].get(key)

    def clear_index(self) -> None:
        """Forget all keys. The dicts stay the same: removed entries still refer to them."""
        for shard in self.shards:
            shard.clear()

    def num_known(self, keys: Sequence[bytes], stop: int, guess: int) -> int:
        """Return how many of keys[:stop], a chain, have entries. An entry outlives its descendants, so those that have
        are a prefix, found by bisection; `guess` is tried first."""
        shards = self.shards
        low, high = 0, stop
        if 0 < guess <= stop:
            key = keys[guess - 1]
            if key in shards[key[-1] & SHARD_MASK]:
                low = guess
                if guess < stop and (key := keys[guess]) not in shards[key[-1] & SHARD_MASK]:
                    return guess
            else:
                high = guess - 1
        while low < high:
            middle = (low + high) // 2
            key = keys[middle]
            if key in shards[key[-1] & SHARD_MASK]:
                low = middle + 1
            else:
                high = middle
        return low


class Entry:
    """One page of one space, in whatever tiers hold a copy. It outlives its copies while a descendant has one.

    Attributes to read: `key` (chain hash), `parent` (the page before it, None for a first page), `space`, and `stamp`
    (when it was last ready anew or hit; a greater one is later, pages of one call share one). An entry that was removed
    holds nothing for ever; the same key gets a new one. `shard` is the dict of its space's index that `key` is in.
    """

    __slots__ = ("busy", "flags", "key", "parent", "row", "shard", "space", "stamp")

    busy: int
    flags: int
    key: bytes
    parent: Entry | None
    row: int
    shard: dict[bytes, int]
    space: Space
    stamp: int

    def __repr__(self) -> str:
        held = [f"{tier}{'' if self.is_ready(tier) else ' (filling)'}" for tier in Tier if self.flags & HELD[tier]]
        return f"Entry({self.key.hex()[:16]}, {', '.join(held) or 'nothing held'})"

    def page(self, tier: Tier) -> int | None:
        """Return the page id in DEVICE or HOST, whether it is being filled or ready, else None."""
        return self.space.columns[tier][self.row] if self.flags & HELD[tier] else None

    def is_ready(self, tier: Tier) -> bool:
        """Tell whether the copy in `tier` is complete; for STORAGE, whether storage is believed to hold it."""
        return self.flags & READY[tier] != 0

    def is_filling(self, tier: Tier) -> bool:
        """Tell whether a copy in `tier` is reserved and not yet published."""
        return self.flags & (HELD[tier] | READY[tier]) == HELD[tier]
