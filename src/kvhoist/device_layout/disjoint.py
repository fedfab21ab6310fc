"""Whether any byte of a layout has two places: then a copy into it would be wrong without a sign."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import NamedTuple

from kvhoist.errors import LayoutError
from kvhoist.layout import ComponentLayout, Layout, Place

_MAX_STEPS = 10_000


class _Set(NamedTuple):
    """The bytes of one layer of one component."""

    label: str
    start: int
    end: int
    strides: tuple[tuple[int, int], ...]  # (stride, length) of unit, row and part
    part_bytes: int


def check_disjoint(layout: Layout) -> None:
    """Raise LayoutError where two units, rows, heads, components or layers of `layout` share a byte."""
    by_buffer: dict[int, list[_Set]] = {}
    for component, placed in zip(layout.group.components, layout.components, strict=True):
        for layer, place in zip(component.layers, placed.places, strict=True):
            label = f"{component.name!r} of layer {layer}"
            by_buffer.setdefault(place.buffer, []).append(_set(label, placed, place, layout.num_units))
    for sets in by_buffer.values():
        for found in sets:
            if _meets_itself(found):
                raise _overlap(layout, f"units, rows or heads of {found.label}", found)
        sets.sort(key=lambda found: found.start)
        for a, b in combinations(sets, 2):
            if b.start < a.end and _meet(a, b):
                raise _overlap(layout, f"{a.label} and {b.label}", a, b)


def _set(label: str, placed: ComponentLayout, place: Place, num_units: int) -> _Set:
    axes = (
        (placed.unit_stride_bytes, num_units),
        (placed.row_stride_bytes, placed.num_rows),
        (placed.part_stride_bytes, placed.num_parts),
    )
    used = tuple((stride, length) for stride, length in axes if length > 1)
    end = place.offset_bytes + sum(stride * (length - 1) for stride, length in used) + placed.part_bytes
    return _Set(label, place.offset_bytes, end, used, placed.part_bytes)


def _meets_itself(found: _Set) -> bool:
    """Nested strides (each at least the extent of all that is inside it) are disjoint; nothing else is accepted."""
    ordered = sorted(found.strides)
    extent = found.part_bytes
    for stride, length in ordered:
        if stride < extent:
            return True
        extent += stride * (length - 1)
    return False


def _meet(a: _Set, b: _Set) -> bool:
    """Tell whether `a` and `b` share a byte: whether some sum of their strides, each taken as often as its axis allows,
    brings a part of one onto a part of the other."""
    reach: Counter[int] = Counter()
    below: Counter[int] = Counter()
    for stride, length in a.strides:
        reach[stride] += length - 1
    for stride, length in b.strides:
        below[stride] += length - 1
    strides = sorted({*reach, *below}, reverse=True)
    ranges = [(stride, -below[stride], reach[stride]) for stride in strides]
    offset = b.start - a.start
    return _hit(ranges, offset - a.part_bytes + 1, offset + b.part_bytes - 1)


def _hit(ranges: list[tuple[int, int, int]], low: int, high: int) -> bool:
    """Tell whether some sum of `stride * n`, `least <= n <= most`, lies in `[low, high]`. Strides descend; with nested
    strides two candidates a level remain, and a search that does not end is taken for a hit."""
    rest = [(0, 0)]
    for stride, least, most in reversed(ranges):
        rest.append((rest[-1][0] + stride * least, rest[-1][1] + stride * most))
    steps = 0
    pending = [(0, low, high)]
    while pending:
        level, low, high = pending.pop()
        steps += 1
        if steps > _MAX_STEPS:
            return True
        if level == len(ranges):
            if low <= 0 <= high:
                return True
            continue
        stride, least, most = ranges[level]
        rest_low, rest_high = rest[len(ranges) - level - 1]
        first = max(least, -((rest_high - low) // stride))
        last = min(most, (high - rest_low) // stride)
        pending.extend((level + 1, low - n * stride, high - n * stride) for n in range(first, last + 1))
    return False


def _overlap(layout: Layout, what: str, *sets: _Set) -> LayoutError:
    shown = "; ".join(f"{s.label}: bytes {s.start} to {s.end}, (stride, length) {list(s.strides)}" for s in sets)
    return LayoutError(
        f"{what} overlap in layout {layout.name!r}",
        got=shown,
        expected="every byte of the cache in a place of its own",
        remedy="Check the order of the axes; an expanded or windowed view cannot hold a cache.",
    )
