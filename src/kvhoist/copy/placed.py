"""Nests over real memory: addresses for offsets, and neighbours that stand at one pitch made one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvhoist.copy.nests import Axis, End, Nest


def placed(nest: Nest, src_bases: Sequence[int], dst_bases: Sequence[int]) -> Nest:
    """Return the nest with addresses for offsets into buffers that start at the given addresses."""
    ends = [
        End(0, bases[end.buffer] + end.offset_bytes, end.unit_stride_bytes, end.block_stride_bytes)
        for end, bases in ((nest.src, src_bases), (nest.dst, dst_bases))
    ]
    return Nest(ends[0], ends[1], nest.run_bytes, nest.axes)


def fused(nests: Sequence[Nest], may_fuse: Callable[[Nest, Nest], bool]) -> list[Nest]:
    """Make one nest of neighbours that are alike and stand at one pitch of addresses on both sides, as the tensors of
    layers that were allocated one after the other mostly do. Only the bytes of the nests themselves are touched.

    `may_fuse(first, last)` can forbid that they become one.
    """
    found: list[Nest] = []
    start = 0
    while start < len(nests):
        first, count, pitch = nests[start], 1, (0, 0)
        for nest in nests[start + 1 :]:
            step = _pitch(nests[start + count - 1], nest)
            if step is None or (count > 1 and step != pitch) or not may_fuse(first, nest):
                break
            count, pitch = count + 1, step
        axes = (Axis(count, *pitch), *first.axes) if count > 1 else first.axes
        found.append(Nest(first.src, first.dst, first.run_bytes, axes))
        start += count
    return found


def _pitch(a: Nest, b: Nest) -> tuple[int, int] | None:
    """Return the address differences of two nests that are alike in all else, else None."""
    src, dst = b.src.offset_bytes - a.src.offset_bytes, b.dst.offset_bytes - a.dst.offset_bytes
    moved = Nest(_shift(a.src, src), _shift(a.dst, dst), a.run_bytes, a.axes)
    return (src, dst) if moved == b else None


def _shift(end: End, num_bytes: int) -> End:
    return End(end.buffer, end.offset_bytes + num_bytes, end.unit_stride_bytes, end.block_stride_bytes)
