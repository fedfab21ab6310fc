"""From two affine layouts to the runs of one unit, and from runs to loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvhoist.layout import ComponentLayout, Layout, Unit

_Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class End:
    """One side of a nest: its first byte for id `u` stands at `offset_bytes + u * unit_stride_bytes` of `buffer`. Where
    the plan steps by blocks and this side's ids name pages, block `j` of a page adds `j * block_stride_bytes`."""

    buffer: int
    offset_bytes: int
    unit_stride_bytes: int
    block_stride_bytes: int = 0


class Axis(NamedTuple):
    """One loop over runs."""

    length: int
    src_stride_bytes: int
    dst_stride_bytes: int


@dataclass(frozen=True, slots=True)
class Nest:
    """Loops over runs of `run_bytes`, outermost axis first; no axis for a single run."""

    src: End
    dst: End
    run_bytes: int
    axes: tuple[Axis, ...] = ()

    @property
    def num_runs(self) -> int:
        return int(np.prod([axis.length for axis in self.axes], dtype=np.int64))

    @property
    def num_bytes(self) -> int:
        return self.num_runs * self.run_bytes

    def numbers(self) -> tuple[int, ...]:
        """Return every byte count that an address of this nest is a sum of multiples of."""
        ends = [(end.offset_bytes, end.unit_stride_bytes, end.block_stride_bytes) for end in (self.src, self.dst)]
        return (self.run_bytes, *ends[0], *ends[1], *(stride for axis in self.axes for stride in axis[1:]))


class _Piece(NamedTuple):
    """Runs of one layer of one component, relative to the layer's place."""

    src: _Offsets
    dst: _Offsets
    num_bytes: _Offsets


class _Block(NamedTuple):
    """Merged runs that share their ends' buffers and strides."""

    src: End
    dst: End
    owner: _Offsets  # which (component, layer) the first byte belongs to: runs of one owner make the inner loops
    runs: _Piece


def make_nests(src: Layout, dst: Layout, layers: frozenset[int], blocks_per_unit: tuple[int, int]) -> tuple[Nest, ...]:
    """Return the nests that move one step: a block where a side's ids name blocks, else a page.

    `blocks_per_unit` is, for each side, how many steps one of its units holds. Runs are the longest that are contiguous
    on both sides whatever the ids, hence the fewest.
    """
    merged = [_merged(*group) for group in _grouped(src, dst, layers, blocks_per_unit)]
    return tuple(nest for block in merged for nest in _loops(block))


def _grouped(
    src: Layout, dst: Layout, layers: frozenset[int], blocks_per_unit: tuple[int, int]
) -> list[tuple[End, End, _Offsets, _Piece]]:
    groups: dict[tuple[End, End], list[tuple[int, _Piece]]] = {}
    owner = 0
    for component, a, b in zip(src.group.components, src.components, dst.components, strict=True):
        num_rows = min(a.num_rows, b.num_rows)
        piece = _merge(_pieces(a, b, num_rows))
        for layer, src_place, dst_place in zip(component.layers, a.places, b.places, strict=True):
            owner += 1
            if layer in layers:
                ends = (
                    End(src_place.buffer, 0, a.unit_stride_bytes, _block_stride(a, num_rows, blocks_per_unit[0])),
                    End(dst_place.buffer, 0, b.unit_stride_bytes, _block_stride(b, num_rows, blocks_per_unit[1])),
                )
                moved = _Piece(piece.src + src_place.offset_bytes, piece.dst + dst_place.offset_bytes, piece.num_bytes)
                groups.setdefault(ends, []).append((owner, moved))
    return [
        (
            ends[0],
            ends[1],
            np.concatenate([np.full(len(piece.src), owner) for owner, piece in pieces]),
            _Piece(*(np.concatenate(arrays) for arrays in zip(*(piece for _, piece in pieces), strict=True))),
        )
        for ends, pieces in groups.items()
    ]


def _block_stride(placed: ComponentLayout, num_rows: int, blocks_per_unit: int) -> int:
    return num_rows * placed.row_stride_bytes if blocks_per_unit > 1 else 0


def _pieces(a: ComponentLayout, b: ComponentLayout, num_rows: int) -> _Piece:
    """Cut a row where a part of either side ends, and repeat it for every row."""
    row_bytes = a.num_parts * a.part_bytes
    starts = np.union1d(np.arange(0, row_bytes, a.part_bytes), np.arange(0, row_bytes, b.part_bytes))
    lengths = np.diff(starts, append=row_bytes)
    rows = np.arange(num_rows, dtype=np.int64)[:, None]

    def offsets(placed: ComponentLayout) -> _Offsets:
        in_row = starts // placed.part_bytes * placed.part_stride_bytes + starts % placed.part_bytes
        flat: _Offsets = (rows * placed.row_stride_bytes + in_row).ravel()
        return flat

    return _Piece(offsets(a), offsets(b), np.tile(lengths, num_rows))


def _first_of_runs(runs: _Piece) -> NDArray[np.intp]:
    """Return where a run starts that does not continue the one before it on both sides. `runs` ascend in `src`."""
    src, dst, num_bytes = runs
    follows = (src[1:] == src[:-1] + num_bytes[:-1]) & (dst[1:] == dst[:-1] + num_bytes[:-1])
    return np.concatenate([[0], np.flatnonzero(~follows) + 1])


def _merge(runs: _Piece) -> _Piece:
    order = np.argsort(runs.src, kind="stable")
    runs = _Piece(*(array[order] for array in runs))
    first = _first_of_runs(runs)
    return _Piece(runs.src[first], runs.dst[first], np.add.reduceat(runs.num_bytes, first))


def _merged(src: End, dst: End, owner: _Offsets, runs: _Piece) -> _Block:
    order = np.argsort(runs.src, kind="stable")
    owner, runs = owner[order], _Piece(*(array[order] for array in runs))
    first = _first_of_runs(runs)
    num_bytes = np.add.reduceat(runs.num_bytes, first)
    by_owner = np.lexsort((runs.src[first], owner[first], num_bytes))
    first = first[by_owner]
    return _Block(src, dst, owner[first], _Piece(runs.src[first], runs.dst[first], num_bytes[by_owner]))


def _loops(block: _Block) -> list[Nest]:
    """Describe the runs by as few regular loops as a greedy reading finds, in the order that they have."""
    nests: list[Nest] = []
    start = 0
    src, dst, num_bytes = block.runs
    while start < len(src):
        same = np.flatnonzero(num_bytes[start:] != num_bytes[start])
        stop = start + int(same[0]) if len(same) else len(src)
        axes, count = _axes(np.stack([src[start:stop], dst[start:stop]], axis=1))
        ends = (_at(block.src, int(src[start])), _at(block.dst, int(dst[start])))
        nests.append(Nest(*ends, int(num_bytes[start]), axes))
        start += count
    return nests


def _axes(offsets: _Offsets) -> tuple[tuple[Axis, ...], int]:
    """Return the axes that describe the longest regular head of `offsets` (num_runs, 2), and how many runs that is."""
    axes: list[Axis] = []
    count = 1
    while 2 * count <= len(offsets):
        stride = offsets[count] - offsets[0]
        num_blocks = len(offsets) // count
        blocks = offsets[: num_blocks * count].reshape(num_blocks, count, 2)
        expected = blocks[0] + np.arange(num_blocks)[:, None, None] * stride
        broken = np.flatnonzero((blocks != expected).any(axis=(1, 2)))
        length = int(broken[0]) if len(broken) else num_blocks
        if length < 2:
            break
        axes.append(Axis(length, int(stride[0]), int(stride[1])))
        count *= length
    return tuple(reversed(axes)), count


def _at(end: End, offset_bytes: int) -> End:
    return End(end.buffer, offset_bytes, end.unit_stride_bytes, end.block_stride_bytes)


def steps_per_unit(layout: Layout, step: Unit) -> int:
    """Return how many steps of a plan one id of `layout` names."""
    return layout.group.blocks_per_page if step is Unit.BLOCK and layout.unit is Unit.PAGE else 1
