"""The tiers, and the bits by which an entry says what it holds in each.

An entry has one int of flags and one int of counters for all tiers, so that the code is the same for every tier and
an entry stays small. At rest in the host tier alone both are ints below 257, which CPython shares; pinned there a few
times, the counters are still one digit of CPython's ints, the fast case.

flags: bit `tier` = a copy is held there (being filled or ready); bit `3 + tier` = it is ready; bit 6 = doomed.
busy:  for each tier 28 bits count the children that hold a copy there, themselves or below them, and 28 more the pins.
       A ready copy whose busy bits of a tier are all zero is a leaf there that may be evicted.
"""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """Where a copy of a page can be. Of STORAGE the directory knows a hint only."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2

    def __str__(self) -> str:
        return self.name.lower()


_FIELD_BITS = 28
_FIELD = (1 << _FIELD_BITS) - 1
_SHIFTS = (2 * _FIELD_BITS, 0, 4 * _FIELD_BITS)  # the host's counts are the lowest

HELD = (1, 2, 4)
READY = (8, 16, 32)
DOOMED = 64
HELD_ANY = sum(HELD)
READY_ANY = sum(READY)

CHILD = tuple(1 << shift for shift in _SHIFTS)
CHILDREN = tuple(_FIELD << shift for shift in _SHIFTS)
PIN = tuple(1 << (shift + _FIELD_BITS) for shift in _SHIFTS)
PINS = tuple(_FIELD << (shift + _FIELD_BITS) for shift in _SHIFTS)
BUSY = tuple(children | pins for children, pins in zip(CHILDREN, PINS, strict=True))
PINS_ANY = sum(PINS)


def num_children(busy: int, tier: int) -> int:
    """Return how many children hold a copy in `tier`, themselves or below them."""
    return busy >> _SHIFTS[tier] & _FIELD


def num_pins(busy: int, tier: int) -> int:
    """Return how often the copy in `tier` is pinned."""
    return busy >> (_SHIFTS[tier] + _FIELD_BITS) & _FIELD
