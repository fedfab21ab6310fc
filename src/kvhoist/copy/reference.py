"""The numpy copy engine: the oracle of every other engine, and the CPU platform's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvhoist.copy.nests import End, Nest
from kvhoist.copy.placed import fused, placed
from kvhoist.copy.plan import CopyPlan, Steps
from kvhoist.errors import LayoutError
from kvhoist.layout import Layout
from kvhoist.platform.base import MemoryRegion

_GATHER_BELOW_BYTES = 8 << 10
"""A step of fewer bytes than this is gathered with others by one fancy index: a numpy call costs about 1 us, in which a
core copies 8 KiB, and the gather copies twice."""

_CHUNK_BYTES = 256 << 10
"""Bytes of one gather: its intermediate stays in the L2 cache."""


@dataclass(frozen=True, slots=True)
class _Move:
    """Views of one or more nests: (units, [blocks,] axes..., run) of each side, and their bytes a step."""

    src: NDArray[Any]
    dst: NDArray[Any]
    step_bytes: int


class _Window:
    """Carries addresses and strides into numpy. The bounds are the plan's; numpy checks none here."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": dtype.str,
            "version": 3,
        }


class BoundPlan:
    """A plan over real memory, its strided views prepared. Keeps the buffers' owners alive. Thread-safe: holds no state
    of a call; calls that touch the same bytes are the caller's to order."""

    def __init__(
        self, plan: CopyPlan, src_buffers: Sequence[MemoryRegion], dst_buffers: Sequence[MemoryRegion]
    ) -> None:
        """Bind `plan` to host-visible buffers, one for each of the layouts' `buffer_bytes`.

        Raises LayoutError for another number of buffers, or one that is shorter than its layout.
        """
        self.plan = plan
        self._buffers = (tuple(src_buffers), tuple(dst_buffers))
        for layout, buffers in zip((plan.src, plan.dst), self._buffers, strict=True):
            _check_buffers(layout, buffers)
        bases = [[region.address for region in buffers] for buffers in self._buffers]
        nests = [placed(nest, bases[0], bases[1]) for nest in plan.nests]
        self._moves = [self._move(nest) for nest in fused(nests, partial(_apart, plan))]

    def copy(self, src_units: ArrayLike, dst_units: ArrayLike) -> int:
        """Copy the units `src_units` to the units `dst_units` and return the bytes moved. Where the ids of
        one side name pages and those of the other blocks, `blocks_per_page` ids stand for a page. A destination block
        that is LEFT_OUT (-1) is not written, what would have gone there is not read, and its bytes are not counted.

        Blocks until the last byte; numpy releases the GIL in each copy. Raises as `CopyPlan.check_ids` does, before
        anything is written.
        """
        src, dst = self.plan.check_ids(src_units, dst_units)
        src_index, dst_index = self.plan.steps_of(src, dst)
        num_steps = len(dst_index[0])
        for move in self._moves:
            if move.step_bytes < _GATHER_BELOW_BYTES:
                self._gather(move, src_index, dst_index, num_steps)
            else:
                self._step(move, src_index, dst_index)
        return num_steps * self.plan.step_bytes

    def _gather(self, move: _Move, src: Steps, dst: Steps, num_steps: int) -> None:
        count = max(1, _CHUNK_BYTES // move.step_bytes)
        for i in range(0, num_steps, count):
            part = slice(i, i + count)
            move.dst[tuple(ids[part] for ids in dst)] = move.src[tuple(ids[part] for ids in src)]

    def _step(self, move: _Move, src: Steps, dst: Steps) -> None:
        steps = zip(
            zip(*(ids.tolist() for ids in src), strict=True),
            zip(*(ids.tolist() for ids in dst), strict=True),
            strict=True,
        )
        for src_step, dst_step in steps:
            move.dst[dst_step] = move.src[src_step]

    def _move(self, nest: Nest) -> _Move:
        numbers = nest.numbers()
        item = next(size for size in (8, 4, 2, 1) if all(number % size == 0 for number in numbers))
        per_src, per_dst = self.plan.steps_per_unit
        src = _view(
            nest.src, [axis.src_stride_bytes for axis in nest.axes], nest, self.plan.src.num_units, per_src, item
        )
        dst = _view(
            nest.dst, [axis.dst_stride_bytes for axis in nest.axes], nest, self.plan.dst.num_units, per_dst, item
        )
        return _Move(src, dst, nest.num_bytes)


def copy(
    plan: CopyPlan,
    src_buffers: Sequence[MemoryRegion],
    src_units: ArrayLike,
    dst_buffers: Sequence[MemoryRegion],
    dst_units: ArrayLike,
) -> int:
    """Bind and copy once. See BoundPlan, which pays the binding once for many calls."""
    return BoundPlan(plan, src_buffers, dst_buffers).copy(src_units, dst_units)


def _check_buffers(layout: Layout, buffers: Sequence[MemoryRegion]) -> None:
    got = [region.num_bytes for region in buffers]
    fits = len(got) == len(layout.buffer_bytes) and all(
        have >= need for have, need in zip(got, layout.buffer_bytes, strict=True)
    )
    if not fits:
        raise LayoutError(
            f"the buffers are not those of layout {layout.name!r}",
            got=f"{len(got)} buffers of {got} bytes",
            expected=f"{len(layout.buffer_bytes)} buffers of at least {list(layout.buffer_bytes)} bytes",
        )


def _apart(plan: CopyPlan, first: Nest, last: Nest) -> bool:
    """Tell whether the addresses from `first` to `last` of one side span none of the other's: numpy would take the two
    for overlapping, and copy twice."""
    hulls = []
    for side, layout, per_unit in ((0, plan.src, plan.steps_per_unit[0]), (1, plan.dst, plan.steps_per_unit[1])):
        ends = [(nest.src, nest.dst)[side] for nest in (first, last)]
        reach = [(axis.length - 1) * axis[1 + side] for axis in first.axes]
        reach += [(layout.num_units - 1) * ends[0].unit_stride_bytes, (per_unit - 1) * ends[0].block_stride_bytes]
        starts = sorted(end.offset_bytes for end in ends)
        below, above = sum(min(0, step) for step in reach), sum(max(0, step) for step in reach)
        hulls.append((starts[0] + below, starts[1] + above + first.run_bytes))
    return hulls[0][0] >= hulls[1][1] or hulls[1][0] >= hulls[0][1]


def _view(end: End, strides: list[int], nest: Nest, num_units: int, per_unit: int, item: int) -> NDArray[Any]:
    blocks = [(per_unit, end.block_stride_bytes)] if per_unit > 1 else []
    axes = zip((axis.length for axis in nest.axes), strides, strict=True)
    shape = [(num_units, end.unit_stride_bytes), *blocks, *axes, (nest.run_bytes // item, item)]
    lengths, steps = zip(*shape, strict=True)
    view: NDArray[Any] = np.asarray(_Window(end.offset_bytes, lengths, steps, np.dtype(f"u{item}")))
    return view
