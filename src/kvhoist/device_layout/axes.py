"""The names of a tensor's axes, and the tensor seen through them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvhoist.device_layout.tensors import TensorBytes
from kvhoist.errors import LayoutError

SLOT, BLOCK, KV, LAYER, TOKEN, REST = "slot", "block", "kv", "layer", "token", "..."
ROW_AXES = ("head", "dim", "pack")  # a row's own axes, outermost first: that is the order of a row's bytes
NAMES = (SLOT, BLOCK, KV, LAYER, TOKEN, *ROW_AXES, REST)

_PATTERN = re.compile(r"\(([^()]*)\)|([^\s()]+)")


@dataclass(frozen=True, slots=True)
class AxisView:
    """One named axis: how many, and bytes from one to the next."""

    length: int
    stride_bytes: int


@dataclass(frozen=True, slots=True)
class Axes:
    """The names of a tensor's axes as the caller wrote them. A dimension that holds several is a tuple of several."""

    text: str
    dims: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Axes:
        """Read names separated by spaces, outermost first; `(kv dim)` is one dimension that holds both; `...` stands
        for all that follows. Raises LayoutError for names that cannot describe a cache."""
        dims = tuple(
            tuple(group.split()) if group or not single else (single,) for group, single in _PATTERN.findall(text)
        )
        names = [name for dim in dims for name in dim]
        unknown = [name for name in names if name not in NAMES]
        if unknown or not names or len(set(names)) != len(names) or not all(dims):
            raise _unreadable(text, f"names {unknown or names}", "each of the names at most once")
        if (SLOT in names) == (BLOCK in names):
            raise _unreadable(text, "both or neither of 'slot' and 'block'", "one of them")
        if SLOT in names and TOKEN in names:
            raise _unreadable(text, "'slot' and 'token'", "'slot' alone (one token a slot), or 'block' and 'token'")
        if REST in names and (dims[-1] != (REST,) or SLOT in names or {TOKEN, *ROW_AXES} & set(names)):
            raise _unreadable(
                text, "'...' beside axes of its own inside", "'block' and then '...' last, for whole blocks"
            )
        if REST not in names and not set(ROW_AXES) & set(names):
            raise _unreadable(text, "no axis of a row", f"one of {', '.join(ROW_AXES)}, or '...' for whole blocks")
        return cls(text, dims)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for dim in self.dims for name in dim)

    def view(self, tensor: TensorBytes, lengths: Mapping[str, int]) -> dict[str, AxisView]:
        """Return the tensor's axes by name, those of `...` merged into one of bytes.

        `lengths` are the lengths that the cache group demands. Raises LayoutError for another number of dimensions
        or a `...` that is not contiguous, GeometryError for an axis of another length.
        """
        dims, shape, strides = list(self.dims), list(tensor.shape), list(tensor.strides_bytes)
        rest = dims[-1] == (REST,)
        if rest:
            dims.pop()
        if len(shape) < len(dims) or (len(shape) != len(dims) and not rest):
            raise tensor.error(
                "does not have the axes that were named",
                got=f"shape {tensor.shape}",
                expected=f"{len(dims)} dimensions for axes {self.text!r}",
                remedy="Write two axes that share a dimension in parentheses, as in 'block head token (kv dim)'.",
            )
        found: dict[str, AxisView] = {}
        for names, length, stride in zip(dims, shape, strides, strict=False):
            found.update(self._split(tensor, names, length, stride, lengths))
        if rest:
            found[REST] = AxisView(tensor.contiguous_bytes(len(dims), self.text), 1)
        for name, axis in found.items():
            if lengths.get(name, axis.length) != axis.length:
                raise tensor.mismatch(
                    f"has another length than the cache group along {name!r}",
                    got=f"{axis.length} in shape {tensor.shape} as {self.text!r}",
                    expected=lengths[name],
                )
        return found

    def _split(
        self, tensor: TensorBytes, names: Sequence[str], length: int, stride: int, lengths: Mapping[str, int]
    ) -> dict[str, AxisView]:
        """Cut one dimension into the axes that it holds; all but one must be of known length."""
        if len(names) == 1:
            return {names[0]: AxisView(length, stride)}
        open_names = [name for name in names if name not in lengths]
        known = 1
        for name in names:
            known *= lengths.get(name, 1)
        if len(open_names) > 1 or length % known or (not open_names and known != length):
            raise tensor.mismatch(
                f"cannot be cut along ({' '.join(names)})",
                got=f"a dimension of {length} in shape {tensor.shape}",
                expected=f"a multiple of {known}, and at most one axis of unknown length (here: {open_names})",
            )
        found: dict[str, AxisView] = {}
        for name in reversed(names):
            count = lengths.get(name, length // known)
            found[name] = AxisView(count, stride)
            stride *= count
        return found


def _unreadable(text: str, got: str, expected: str) -> LayoutError:
    return LayoutError(
        f"axes {text!r} cannot be read", got=got, expected=expected, choices=[*NAMES, "(two names) for one dimension"]
    )
