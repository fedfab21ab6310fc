"""What is read of a tensor, whatever library it comes from: address, shape, strides, device, storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvhoist.errors import GeometryError, LayoutError
from kvhoist.platform.base import CPU, Device


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor as bytes. `storage` is the span (address, end) that it shares with other views of the same memory."""

    label: str
    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int
    dtype: str
    device: Device
    storage: tuple[int, int]

    @property
    def end(self) -> int:
        """The address after the last element's last byte."""
        spans = zip(self.shape, self.strides_bytes, strict=True)
        return self.address + sum((length - 1) * stride for length, stride in spans) + self.item_bytes

    def error(self, what: str, *, got: object, expected: object, remedy: str | None = None) -> LayoutError:
        return LayoutError(f"tensor {self.label} {what}", got=got, expected=expected, remedy=remedy)

    def mismatch(self, what: str, *, got: object, expected: object, remedy: str | None = None) -> GeometryError:
        return GeometryError(f"tensor {self.label} {what}", got=got, expected=expected, remedy=remedy)

    def contiguous_bytes(self, first: int, axes: str) -> int:
        """Return the bytes that the dimensions from `first` on hold. Raises LayoutError if they are not contiguous."""
        num_bytes = self.item_bytes
        for length, stride in zip(reversed(self.shape[first:]), reversed(self.strides_bytes[first:]), strict=True):
            if length > 1 and stride != num_bytes:
                raise self.error(
                    "is not contiguous inside a block",
                    got=f"shape {self.shape}, strides {self.strides_bytes} B as {axes!r}",
                    expected="the bytes of one block one after the other",
                    remedy="Name the axes inside the block instead of '...'.",
                )
            num_bytes *= length
        return num_bytes


def read_tensor(tensor: Any, label: str) -> TensorBytes:
    """Read a torch tensor (by `data_ptr()`, `stride()`, `element_size()`, `device`) or a numpy array, without importing
    either. Raises LayoutError for what offers neither, is empty, or has a negative stride."""
    offers_torch = getattr(tensor, "data_ptr", None)
    offers_numpy = getattr(tensor, "__array_interface__", None)
    if offers_torch is not None:
        found = _from_torch(tensor, label)
    elif offers_numpy is not None:
        found = _from_numpy(tensor, label)
    else:
        raise LayoutError(
            f"tensor {label} cannot be read",
            got=type(tensor).__name__,
            expected="a torch tensor or numpy array (data_ptr(), shape, stride(), element_size(), device; or strides)",
        )
    if not found.shape or min(found.shape) < 1 or min(found.strides_bytes) < 0:
        raise found.error(
            "has no usable shape",
            got=f"shape {found.shape}, strides {found.strides_bytes} B",
            expected="at least one dimension, no empty one, no negative stride",
        )
    return found


def _from_torch(tensor: Any, label: str) -> TensorBytes:
    item_bytes = int(tensor.element_size())
    storage = tensor.untyped_storage()
    start = int(storage.data_ptr())
    return TensorBytes(
        label=label,
        address=int(tensor.data_ptr()),
        shape=tuple(int(length) for length in tensor.shape),
        strides_bytes=tuple(int(stride) * item_bytes for stride in tensor.stride()),
        item_bytes=item_bytes,
        dtype=str(tensor.dtype),
        device=Device(str(tensor.device.type), int(tensor.device.index or 0)),
        storage=(start, start + int(storage.nbytes())),
    )


def _from_numpy(array: Any, label: str) -> TensorBytes:
    root = array if getattr(array.base, "__array_interface__", None) is None else array.base
    found = [
        TensorBytes(
            label=label,
            address=int(view.__array_interface__["data"][0]),
            shape=tuple(int(length) for length in view.shape),
            strides_bytes=tuple(int(stride) for stride in view.strides),
            item_bytes=int(view.itemsize),
            dtype=str(view.dtype),
            device=CPU,
            storage=(0, 0),
        )
        for view in (array, root)
    ]
    return replace(found[0], storage=(min(f.address for f in found), max(f.end for f in found)))


def spans(tensors: Sequence[TensorBytes]) -> list[tuple[int, int]]:
    """Return the distinct storages (address, end), ascending; those that overlap are one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted({tensor.storage for tensor in tensors}):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
