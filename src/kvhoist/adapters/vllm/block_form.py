"""How one tensor of vLLM's holds its blocks: read off shape and strides, whatever the axes inside a block mean."""

from __future__ import annotations

from dataclasses import dataclass

from kvhoist.device_layout.tensors import TensorBytes

_PLANES = ("k", "v")
_WHOLE = ("block",)


@dataclass(frozen=True, slots=True)
class BlockForm:
    """How one tensor holds its blocks. A row is a whole block, of one plane where there are two (`names`: `k` and `v`,
    else `block`), in `num_parts` contiguous pieces at one pitch. `order` says backend, dtype and order of the bytes."""

    names: tuple[str, ...]
    plane_stride_bytes: int
    unit_stride_bytes: int
    part_bytes: int
    num_parts: int
    part_stride_bytes: int
    order: str

    @property
    def row_bytes(self) -> int:
        return self.part_bytes * self.num_parts


def block_form(tensor: TensorBytes, block_dim: int, num_blocks: int, block_tokens: int, backend: str) -> BlockForm:
    """Read how `tensor` holds `num_blocks` blocks along its axis `block_dim`: each one or several steps of it.

    An axis of two before the block axis, further apart in memory than two blocks, separates planes. All other axes are
    inside a block, in the order of their strides. Raises LayoutError, GeometryError where that is not possible.
    """
    shape, strides = tensor.shape, tensor.strides_bytes
    if len(shape) < 2 or not 0 <= block_dim < len(shape):
        raise tensor.error(
            "has no blocks that can be read",
            got=f"shape {shape}, block axis {block_dim}",
            expected="an axis of blocks and axes inside a block",
        )
    ratio, rest = divmod(shape[block_dim], num_blocks)
    if rest or ratio < 1 or block_tokens % ratio:
        raise tensor.mismatch(
            "has another number of blocks than vLLM's scheduler",
            got=f"{shape[block_dim]} along axis {block_dim} of shape {shape}",
            expected=f"{num_blocks}, or that many times a divisor of the {block_tokens} tokens of a block",
        )
    unit_stride = ratio * strides[block_dim]
    plane = next((dim for dim in range(block_dim) if shape[dim] == len(_PLANES) and strides[dim] >= unit_stride), None)
    axes = {
        dim: (ratio if dim == block_dim else length, strides[dim]) for dim, length in enumerate(shape) if dim != plane
    }
    return BlockForm(
        _WHOLE if plane is None else _PLANES,
        0 if plane is None else strides[plane],
        unit_stride,
        *_parts(tensor, [(length, stride) for length, stride in axes.values() if length > 1]),
        order=f"{backend} {tensor.dtype.removeprefix('torch.')} {_order(axes, block_dim, plane)}",
    )


def _parts(tensor: TensorBytes, axes: list[tuple[int, int]]) -> tuple[int, int, int]:
    """Return (part_bytes, num_parts, part_stride_bytes) of a block: its contiguous runs, at one pitch."""
    part_bytes, num_parts, pitch = tensor.item_bytes, 1, 0
    for length, stride in sorted(axes, key=lambda axis: axis[1]):
        if num_parts == 1 and stride == part_bytes:
            part_bytes *= length
        elif num_parts == 1 and stride > part_bytes:
            num_parts, pitch = length, stride
        elif num_parts > 1 and stride == num_parts * pitch:
            num_parts *= length
        else:
            raise tensor.error(
                "has blocks whose bytes lie in no regular order",
                got=f"shape {tensor.shape}, strides {tensor.strides_bytes} B of {tensor.dtype}: an axis of {length} at "
                f"{stride} B does not continue {num_parts} x {part_bytes} B at a pitch of {pitch} B",
                expected="the bytes of a block contiguous, or in equal contiguous pieces at one pitch",
                remedy="Choose another attention backend or KV cache layout, or report this model.",
            )
    return part_bytes, num_parts, pitch


def _order(axes: dict[int, tuple[int, int]], block_dim: int, plane: int | None) -> str:
    """Return shape and strides (in items) inside a block, as they are once its pieces stand one after the other: of
    kernel blocks (`b`) and all other axes in the tensor's order, 0 for an axis of one. No two orders share a text."""
    compact = dict.fromkeys(axes, 0)
    items = 1
    for dim in sorted((dim for dim in axes if axes[dim][0] > 1), key=lambda dim: axes[dim][1]):
        compact[dim] = items
        items *= axes[dim][0]
    lengths = {dim: f"{'b' if dim == block_dim else ''}{length}" for dim, (length, _) in axes.items()}
    strides = {dim: str(stride) for dim, stride in compact.items()}
    if plane is not None:
        lengths[plane], strides[plane] = str(len(_PLANES)), "plane"
    return f"{'x'.join(lengths[dim] for dim in sorted(lengths))}/{','.join(strides[dim] for dim in sorted(strides))}"
