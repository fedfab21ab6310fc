"""The paged device pool that the adapter owns: per component and layer one tensor `[slots, heads, head_dim]`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvhoist.adapters.transformers.shape import CachedPart, CacheShape
from kvhoist.device_layout import DeviceCache, read_device_layout
from kvhoist.errors import CapacityError
from kvhoist.memory.budget import host_budget
from kvhoist.units import format_bytes


class PagedPool:
    """`num_pages` pages of KV in the model's dtype on the model's device; slot = token, page `p` is the slots
    `p * page_tokens` to `(p + 1) * page_tokens`.

    `pool_bytes` are exactly the tensors' bytes; they are written once here, so that the memory is really there.
    Raises CapacityError for a pool that the device's free memory cannot hold. `tensors` maps a component to its
    layers' tensors; MLA's `latent` rows are one head wide.
    """

    def __init__(self, shape: CacheShape, num_pages: int) -> None:
        self.shape = shape
        self.num_pages = num_pages
        self.page_tokens = shape.group.page_tokens
        self.pool_bytes = num_pages * shape.group.page_bytes
        _check_fits(self.pool_bytes, shape.device, num_pages * self.page_tokens)
        self.tensors: dict[str, list[torch.Tensor]] = {
            component.name: list(self._empty(component.name, len(component.layers)).zero_().unbind(0))
            for component in shape.group.components
        }
        self.device_cache: DeviceCache = read_device_layout(
            shape.group, self.tensors, "slot head dim", name="the transformers pool"
        )

    def current_stream(self) -> int:
        """Return the handle of the stream in which the calling thread's model works; 0 on the CPU."""
        device = self.shape.device
        return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0

    def _empty(self, component: str, num_layers: int) -> torch.Tensor:
        """Return one allocation for all layers: at one pitch, a page of many layers is one strided copy."""
        parts = [part for part in self.shape.parts if part.component == component]
        heads, dim = (parts[0].num_heads, parts[0].head_dim) if len(parts) == 1 else (1, _row_elements(parts))
        slots = self.num_pages * self.page_tokens
        return torch.empty((num_layers, slots, heads, dim), dtype=self.shape.dtype, device=self.shape.device)

    def _rows(self, part: CachedPart, layer: int) -> torch.Tensor:
        """Return the view `[num_pages, page_tokens, heads, head_dim]` of one cached tensor's elements."""
        tensor = self.tensors[part.component][layer]
        rows = tensor.view(self.num_pages, self.page_tokens, -1)
        rows = rows.narrow(2, part.first_element, part.row_elements)
        return rows.unflatten(2, (part.num_heads, part.head_dim))

    def index(self, pages: Sequence[int]) -> torch.Tensor:
        """Return page ids as `gather` and `scatter` take them. On a GPU this waits for the model's stream, as any copy
        of unpinned memory does: once for all layers, before the forward."""
        return torch.tensor(pages, dtype=torch.long, device=self.shape.device)

    def gather(self, part: CachedPart, layer: int, pages: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the pages of an `index`, in their order, into `out` `[heads, len(pages) * page_tokens, head_dim]`."""
        into = out.unflatten(1, (len(pages), self.page_tokens)).permute(1, 2, 0, 3)
        rows, into = _as_words(self._rows(part, layer), into)
        torch.index_select(rows, 0, pages, out=into)

    def scatter(self, part: CachedPart, layer: int, pages: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy `rows` of shape `[heads, len(pages) * page_tokens, head_dim]` into the pages of an `index`."""
        paged = rows.transpose(0, 1).unflatten(0, (len(pages), self.page_tokens))
        self._rows(part, layer).index_copy_(0, pages, paged)


def _row_elements(parts: Sequence[CachedPart]) -> int:
    return max(part.first_element + part.row_elements for part in parts)


def _as_words(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return views of 8 bytes an element where all of them can be seen so, else the tensors: a kernel that moves
    elements by index then moves a quarter as many of them for bf16."""
    size = 8 // tensors[0].element_size()
    steps = (step for t in tensors for step in (*t.stride()[:-1], t.storage_offset(), t.shape[-1]))
    fits = all(step % size == 0 for step in steps) and all(t.stride(-1) == 1 for t in tensors)
    return [t.view(torch.int64) for t in tensors] if fits else tensors


def _check_fits(pool_bytes: int, device: torch.device, num_tokens: int) -> None:
    if device.type == "cuda":
        available, bound = torch.cuda.mem_get_info(device)[0], f"what is free on {device}"
    else:
        budget = host_budget()
        available, bound = budget.available_bytes, str(budget.tightest)
    if pool_bytes > available:
        raise CapacityError(
            f"a device pool of {num_tokens} tokens does not fit into memory",
            got=format_bytes(pool_bytes),
            expected=f"at most {format_bytes(available)} ({bound})",
            remedy="Lower device_tokens or device_bytes.",
        )
