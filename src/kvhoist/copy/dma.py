"""The dma copy engine: runs go straight to their places by the device's copy engines, without a kernel.

Where the runs of a step stand at one pitch on both sides, as those of all layers do when these share an allocation, one
2-D copy moves them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvhoist.copy.engine import Between, Started, whole_or_nothing
from kvhoist.copy.nests import Axis, End, Nest
from kvhoist.copy.placed import fused, placed
from kvhoist.copy.plan import CopyPlan, Steps
from kvhoist.platform.base import Event, IdArray, Platform, Rects, Stream

_MAX_BATCH = 4096
"""Copies of one call: the driver reads the whole batch before the first byte moves."""


class _End(NamedTuple):
    """One side of a step's copies, an entry a copy: addresses for unit 0, and what a unit and a block of it add."""

    addresses: IdArray
    unit_strides: IdArray
    block_strides: IdArray

    def of_steps(self, steps: Steps) -> IdArray:
        """Return the addresses for all steps, step after step."""
        strides = zip(steps, (self.unit_strides, self.block_strides), strict=False)
        return sum((ids[:, None] * stride for ids, stride in strides), self.addresses).ravel()


class _Copies:
    """The copies of one step of a layer group, as rows of `heights` runs."""

    def __init__(self, nests: Sequence[Nest], max_pitch_bytes: int) -> None:
        rows = [row for nest in nests for row in _rows(nest, max_pitch_bytes)]
        self._widths = np.array([row[0].run_bytes for row in rows], dtype=np.int64)
        self._axes = np.array([row[1] for row in rows], dtype=np.int64).reshape(-1, 3)
        self._src = _ends([row[0].src for row in rows])
        self._dst = _ends([row[0].dst for row in rows])

    def enqueue(self, steps: tuple[Steps, Steps], platform: Platform, stream: Stream) -> None:
        """Enqueue the copies of all steps of source and destination."""
        src, dst = self._src.of_steps(steps[0]), self._dst.of_steps(steps[1])
        num_steps = len(steps[0][0])
        widths, axes = np.tile(self._widths, num_steps), np.tile(self._axes, (num_steps, 1))
        tall = axes[:, 0] > 1
        for part in _parts(~tall):
            platform.copy_batch(src[part], dst[part], widths[part], stream)
        for part in _parts(tall):
            heights, src_pitches, dst_pitches = axes[part].T
            rects = Rects(src[part], dst[part], widths[part], heights, src_pitches, dst_pitches)
            platform.copy_batch_2d(rects, stream)


class DmaCopy:
    """One direction between a host arena and a device cache. For one thread at a time."""

    def __init__(self, between: Between, *, num_groups: int = 1) -> None:
        self.between = between
        self._platform = between.platform
        self._stream = self._platform.make_stream(between.priority)
        self.streams: tuple[Stream, ...] = (self._stream,)
        host = [between.host.region.address]
        device = [region.address for region in between.device]
        bases = (host, device) if between.loads else (device, host)
        self._groups = [
            (len(part.layers), self._copies(part, *bases)) for part in between.plan.layer_groups(num_groups)
        ]

    def synchronize(self) -> None:
        """Block until all that was enqueued is done."""
        self._stream.synchronize()

    def start(self, pages: IdArray, blocks: IdArray, after: Event | None) -> Started:
        """Enqueue the copy of host `pages` and device `blocks` behind `after`. Where it raises nothing is under way."""
        plan, loads = self.between.plan, self.between.loads
        ids = (pages, blocks) if loads else (blocks, pages)
        steps = plan.steps_of(*ids)
        marks: list[tuple[int, Event]] = []
        done = 0
        with self._platform.current(), whole_or_nothing(self):
            if after is not None:
                self._stream.wait(after)
            for num_layers, copies in self._groups:
                copies.enqueue(steps, self._platform, self._stream)
                done += num_layers
                marks.append((done, self._platform.record(self._stream)))
        return Started(marks, marks[-1][1])

    def _copies(self, plan: CopyPlan, src_bases: list[int], dst_bases: list[int]) -> _Copies:
        nests = fused([placed(nest, src_bases, dst_bases) for nest in plan.nests], self._starts_in_one_allocation)
        whole = all(self._in_one_allocation(region.address, region.end - 1) for region in self.between.device)
        return _Copies(nests, self._platform.capabilities.max_pitch_bytes if whole else 0)

    def _starts_in_one_allocation(self, first: Nest, last: Nest) -> bool:
        return self._in_one_allocation(
            *((nest.dst if self.between.loads else nest.src).offset_bytes for nest in (first, last))
        )

    def _in_one_allocation(self, *addresses: int) -> bool:
        """Tell whether a 2-D copy may touch all of them. A tensor alone may span several, as torch's expandable
        segments do."""
        return len({self._platform.allocation_of(address) for address in addresses}) == 1


def _rows(nest: Nest, max_pitch_bytes: int) -> list[tuple[Nest, Axis]]:
    """Return the nest as copies of one row of runs each: its longest axis that a 2-D copy can have, and where those
    copies start for all others."""
    able = [axis for axis in nest.axes if all(nest.run_bytes <= pitch <= max_pitch_bytes for pitch in axis[1:])]
    longest = max(able, key=lambda axis: axis.length, default=Axis(1, nest.run_bytes, nest.run_bytes))
    others = [axis for axis in nest.axes if axis is not longest]
    found = []
    for at in itertools.product(*(range(axis.length) for axis in others)):
        src, dst = (sum(i * axis[side] for i, axis in zip(at, others, strict=True)) for side in (1, 2))
        found.append((Nest(_moved(nest.src, src), _moved(nest.dst, dst), nest.run_bytes), longest))
    return found


def _moved(end: End, num_bytes: int) -> End:
    return End(0, end.offset_bytes + num_bytes, end.unit_stride_bytes, end.block_stride_bytes)


def _ends(ends: Sequence[End]) -> _End:
    numbers = [(end.offset_bytes, end.unit_stride_bytes, end.block_stride_bytes) for end in ends]
    return _End(*np.array(numbers, dtype=np.int64).reshape(-1, 3).T)


def _parts(chosen: np.ndarray) -> list[IdArray]:
    """Return the indices of what is chosen, so many at a time as one call takes."""
    indices = np.flatnonzero(chosen)
    return [indices[i : i + _MAX_BATCH] for i in range(0, len(indices), _MAX_BATCH)]
