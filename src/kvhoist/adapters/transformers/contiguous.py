"""The model's own contiguous cache, with room to grow: filled from pages, appended to in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvhoist.adapters.transformers.shape import CachedPart, CacheShape
from kvhoist.units import round_up

_GRAIN_TOKENS = 64  # capacities are multiples of it, so that every head starts at an aligned address


class ContiguousLayer(DynamicLayer):
    """A `DynamicLayer` whose `keys` and `values` are the first tokens of larger buffers.

    The stock layer concatenates: it copies the whole prefix for every generated token. Values are the same to the bit.
    A prefix may be filled in late: by what `fill_late` was given, when the model first comes to this layer.
    """

    def __init__(self, shape: CacheShape, batch: int, capacity_tokens: int) -> None:
        super().__init__()
        self.buffers: dict[str, torch.Tensor] = {
            part.attribute: torch.empty(
                (batch, part.num_heads, capacity_tokens, part.head_dim), dtype=shape.dtype, device=shape.device
            )
            for part in shape.parts
        }
        self.dtype, self.device = shape.dtype, shape.device
        self.is_initialized = True
        self._late: Callable[[], None] | None = None
        self.set_length(0)

    def set_length(self, num_tokens: int) -> None:
        """Declare the first `num_tokens` tokens of the buffers to be the cache."""
        self.keys = self.buffers["keys"][:, :, :num_tokens]
        self.values = self.buffers["values"][:, :, :num_tokens]

    def fill_late(self, fill: Callable[[], None]) -> None:
        """Have `fill` write the cache's tokens into the buffers before they are first read, or at `fill_now`. What it
        raises comes out of the model's forward."""
        self._late = fill

    def fill_now(self) -> None:
        """Fill in what the model did not ask for. Idempotent."""
        fill, self._late = self._late, None
        if fill is not None:
            fill()

    def clear(self, row: int, num_tokens: int) -> None:
        """Zero the first `num_tokens` tokens of a row: a weight of 0 does not mask the NaN that memory may hold."""
        for buffer in self.buffers.values():
            buffer[row, :, :num_tokens].zero_()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.fill_now()
        start = self.keys.shape[2]
        stop = start + key_states.shape[2]
        if stop > self.buffers["keys"].shape[2]:
            self._grow(stop)
        self.buffers["keys"][:, :, start:stop].copy_(key_states)
        self.buffers["values"][:, :, start:stop].copy_(value_states)
        self.set_length(stop)
        return self.keys, self.values

    def _grow(self, num_tokens: int) -> None:
        length = self.keys.shape[2]
        capacity = round_up(max(num_tokens, 2 * length), _GRAIN_TOKENS)
        for name, old in self.buffers.items():
            larger = old.new_empty((*old.shape[:2], capacity, old.shape[3]))
            larger[:, :, :length].copy_(old[:, :, :length])
            self.buffers[name] = larger


def contiguous_cache(model: Any, shape: CacheShape, batch: int, capacity_tokens: int) -> Any:
    """Return an empty `DynamicCache` for `batch` rows with room for `capacity_tokens` before it must grow."""
    cache = DynamicCache(config=model.config)
    capacity = round_up(max(1, capacity_tokens), _GRAIN_TOKENS)
    cache.layers = [ContiguousLayer(shape, batch, capacity) for _ in range(shape.num_layers)]
    return cache


def part_of(cache: Any, part: CachedPart, layer: int) -> torch.Tensor:
    """Return one cached tensor `[batch, heads, tokens, head_dim]` with its spare room."""
    buffer: torch.Tensor = cache.layers[layer].buffers[part.attribute]
    return buffer
