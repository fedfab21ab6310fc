"""The pages of one of SGLang's host pools: where their bytes lie, and how storage reads and writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvhoist.errors import ConfigError, UnsupportedGeometryError
from kvhoist.platform.base import MemoryRegion
from kvhoist.platform.cpu import host_view
from kvhoist.storage.base import Buffer

_MAX_PIECES = 4
"""A page in more pieces than this (`layer_first`: two a layer) is stored as one record, by way of a copy."""

_ROUND_BYTES = 64 << 20
"""How much of a batch is copied at a time where pages cannot be read and written in place."""


class HostPages:
    """Pages of the host pool `pool`, which SGLang owns and keeps alive; called `name` among the engine's pools.

    A page is stored as one record a piece where its bytes lie in few contiguous pieces (`page_first`,
    `page_first_direct`, `page_head`: K and V, or the latent rows), read and written in place. Otherwise it is one
    record, which the pool's own `get_data_page` and `set_from_flat_data_page` copy. Both hold the bytes of a flat page
    in the same order.

    Host indices are SGLang's: one a slot, `page_slots` a page, of which the first names the page. Raises
    UnsupportedGeometryError for a pool that can do neither.
    """

    def __init__(self, name: str, pool: Any) -> None:
        self.name = name
        self.pool = pool
        self.page_slots = int(getattr(pool, "page_size", 1) or 1)
        flat = _flat_page(pool)
        pieces = _pieces(pool, self.page_slots)
        self._flat_dtype = None if flat is None else flat.dtype
        self.in_place = pieces is not None and (flat is None or _is_the_flat_page(pieces, flat))
        if self.in_place and pieces is not None:
            self.record_bytes = tuple(num_bytes for _, num_bytes in pieces)
        elif flat is not None and flat.numel():
            self.record_bytes = (flat.numel() * flat.element_size(),)
        else:
            raise UnsupportedGeometryError(
                f"the pages of SGLang's host pool {name!r} cannot be read",
                got=f"{type(pool).__name__} with layout {getattr(pool, 'layout', None)!r}",
                expected="a pool whose get_page_buffer_meta or get_data_page gives a page's bytes",
                remedy="Set --hicache-mem-layout page_first or page_first_direct; pools without bytes of their own "
                "(DeepSeek V4) are not served.",
            )
        self.page_bytes = sum(self.record_bytes)
        self.pages_a_round = 1 << 30 if self.in_place else max(1, _ROUND_BYTES // self.page_bytes)

    def memory(self) -> list[Buffer]:
        """Return the memory in which pages are read and written in place, as far as the pool tells."""
        held = getattr(self.pool, "kv_buffer", None) if self.in_place else None
        tensors = held if isinstance(held, list | tuple) else [held]
        return [bytes_of(one) for one in tensors if isinstance(one, torch.Tensor) and one.is_contiguous()]

    def slots_of(self, host_indices: Any, num_pages: int) -> torch.Tensor:
        """Return the indices as they are used here. Raises ConfigError where they are not `page_slots` a page."""
        if host_indices is None or host_indices.numel() != num_pages * self.page_slots:
            given = None if host_indices is None else host_indices.numel()
            raise ConfigError(
                f"host indices of pool {self.name!r} do not fit the keys",
                got=f"{given} for {num_pages} pages",
                expected=f"{self.page_slots} a page",
            )
        return host_indices.cpu()

    def sources(self, slots: torch.Tensor) -> list[Buffer]:
        """Return the records' bytes, page by page, to be stored: the pool's own memory, or copies."""
        if self.in_place:
            return self._places(slots)
        return [bytes_of(self.pool.get_data_page(slot, flat=True).contiguous()) for slot in self._firsts(slots)]

    def targets(self, slots: torch.Tensor) -> list[Buffer]:
        """Return where the records are to be read to, page by page: the pool's own memory, or buffers for `accept`."""
        if self.in_place:
            return self._places(slots)
        return [memoryview(bytearray(self.page_bytes)) for _ in self._firsts(slots)]

    def accept(self, slots: torch.Tensor, targets: Sequence[Buffer], good: Sequence[bool]) -> None:
        """Put the good pages of `targets`, as read, into the pool; in place, they are there already."""
        if self.in_place:
            return
        for slot, target, ok in zip(self._firsts(slots), targets, good, strict=True):
            if ok:
                page = torch.frombuffer(target, dtype=torch.uint8)
                self.pool.set_from_flat_data_page(slot, page.view(self._flat_dtype))

    def split(self, page: Any) -> list[Buffer]:
        """Cut a flat page (a contiguous CPU tensor) into its records. Raises ConfigError where it is no such page."""
        if self._flat_dtype is None or not isinstance(page, torch.Tensor) or not page.is_contiguous():
            raise ConfigError(f"no flat page of pool {self.name!r}", got=type(page).__name__, expected="its tensor")
        whole = bytes_of(page)
        if len(whole) != self.page_bytes:
            raise ConfigError(
                f"a flat page of another size than pool {self.name!r} has",
                got=f"{len(whole)} bytes",
                expected=f"{self.page_bytes} bytes",
            )
        ends = [sum(self.record_bytes[: i + 1]) for i in range(len(self.record_bytes))]
        return [whole[end - num_bytes : end] for end, num_bytes in zip(ends, self.record_bytes, strict=True)]

    def _firsts(self, slots: torch.Tensor) -> list[int]:
        return [int(slot) for slot in slots[:: self.page_slots].tolist()]

    def _places(self, slots: torch.Tensor) -> list[Buffer]:
        addresses, sizes = self.pool.get_page_buffer_meta(slots)
        return [host_view(MemoryRegion(*place)).data for place in zip(addresses, sizes, strict=True)]


def bytes_of(tensor: torch.Tensor) -> Buffer:
    """Return the memory of a contiguous CPU tensor of any dtype, not a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy()).cast("B")


def _pieces(pool: Any, page_slots: int) -> list[tuple[int, int]] | None:
    """Return (address, bytes) of the pieces of the pool's first page; None where it does not say, or in too many."""
    try:
        addresses, sizes = pool.get_page_buffer_meta(torch.arange(page_slots)) or ((), ())
    except (AttributeError, NotImplementedError, ValueError):  # each of them is a pool's way to say no
        return None
    pieces = list(zip(addresses, sizes, strict=True))
    return pieces if 0 < len(pieces) <= _MAX_PIECES and all(num_bytes > 0 for _, num_bytes in pieces) else None


def _flat_page(pool: Any) -> torch.Tensor | None:
    """Return the pool's first page, a view where the pool has one; None where it has no flat pages."""
    try:
        page = pool.get_data_page(0, flat=False)
    except (AttributeError, NotImplementedError, ValueError):
        return None
    return page if isinstance(page, torch.Tensor) else None


def _is_the_flat_page(pieces: Sequence[tuple[int, int]], flat: torch.Tensor) -> bool:
    """Tell whether the pieces, in their order, are the bytes of the flat page in its order."""
    if len(pieces) > 1 and (flat.dim() == 0 or flat.shape[0] != len(pieces)):
        return False
    parts = [flat] if len(pieces) == 1 else list(flat)
    return all(
        part.is_contiguous() and (part.data_ptr(), part.numel() * part.element_size()) == piece
        for part, piece in zip(parts, pieces, strict=True)
    )
