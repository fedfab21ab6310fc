"""Prefixes in and out of the model's contiguous cache, by way of the pool and the facade."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvhoist.adapters.transformers.contiguous import part_of
from kvhoist.adapters.transformers.pool import PagedPool
from kvhoist.cache import HierarchicalCache, Lease


class Prefixes:
    """Looks up, loads and stores the pages of token sequences. `salt` separates those who must not share pages."""

    def __init__(self, cache: HierarchicalCache, pool: PagedPool) -> None:
        self._cache = cache
        self._pool = pool

    def acquire(self, tokens: Sequence[int], salt: bytes) -> Lease:
        """Bring the longest cached prefix of `tokens` onto the device and pin it there. The last token is left out: it
        must be computed for its logits."""
        match = self._cache.match(tokens, salt=salt, max_tokens=len(tokens) - 1)
        return self._cache.acquire(match)

    @torch.inference_mode()
    def fill(self, lease: Lease, contiguous: Any, row: int, column: int) -> None:
        """Copy the leased pages, which must have arrived, into row `row` of the contiguous cache from column `column`."""
        pages = lease.device_pages[: lease.num_tokens // self._pool.page_tokens]
        for layer in range(self._pool.shape.num_layers):
            for part in self._pool.shape.parts:
                out = part_of(contiguous, part, layer)[row, :, column : column + lease.num_tokens]
                self._pool.gather(part, layer, pages, out)

    @torch.inference_mode()
    def store(self, tokens: Sequence[int], lease: Lease, salt: bytes, contiguous: Any, row: int, column: int) -> int:
        """Keep the whole pages of `tokens` that are not on the device yet, as far as the pool has room; return how many.

        Token `t` stands in column `column + t` of row `row`. The pages become visible only when all are written; an
        error on the way gives them back.
        """
        page_tokens = self._pool.page_tokens
        with self._cache.reserve(tokens, lease=lease, salt=salt) as reservation:
            pages = reservation.device_pages
            if not pages:
                return 0
            start = column + reservation.first_page * page_tokens
            stop = start + len(pages) * page_tokens
            for layer in range(self._pool.shape.num_layers):
                for part in self._pool.shape.parts:
                    rows = part_of(contiguous, part, layer)[row, :, start:stop]
                    self._pool.scatter(part, layer, pages, rows)
            reservation.commit()
        return len(pages)
