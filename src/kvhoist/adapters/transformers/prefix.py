"""Prefixes in and out of the model's contiguous cache, by way of the pool and the facade."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvhoist.adapters.transformers.contiguous import part_of
from kvhoist.adapters.transformers.pool import PagedPool
from kvhoist.cache import HierarchicalCache
from kvhoist.control.keys import TokenChain
from kvhoist.lease import Lease


class Prefixes:
    """Looks up, loads and stores the pages of token sequences. Each has a chain, so that a page is hashed once."""

    def __init__(self, cache: HierarchicalCache, pool: PagedPool) -> None:
        self._cache = cache
        self._pool = pool

    def chain(self, salt: bytes) -> TokenChain:
        """Return a new sequence's chain. `salt` separates those who must not share pages."""
        return TokenChain(self._pool.page_tokens, salt)

    def acquire(self, tokens: Sequence[int], chain: TokenChain) -> Lease:
        """Bring the longest cached prefix of `tokens` onto the device, wait until it is there, and pin it. The last one
        is left out: it must be computed for its logits. A load that fails, or is late, leaves a shorter prefix."""
        match = self._cache.match(tokens, chain=chain, max_tokens=len(tokens) - 1)
        return self._cache.acquire(match, for_whom=_name(tokens))

    @torch.inference_mode()
    def fill(self, lease: Lease, contiguous: Any, row: int, column: int) -> None:
        """Copy the leased pages into row `row` of the contiguous cache, from `column` on."""
        for layer in range(self._pool.shape.num_layers):
            for part in self._pool.shape.parts:
                out = part_of(contiguous, part, layer)[row, :, column : column + lease.num_tokens]
                self._pool.gather(part, layer, lease.device_pages, out)

    @torch.inference_mode()
    def store(
        self, tokens: Sequence[int], lease: Lease, chain: TokenChain, contiguous: Any, row: int, column: int
    ) -> int:
        """Keep the whole pages of `tokens` that are not on the device yet, as far as there is room; return how many.

        Token `t` stands in column `column + t` of row `row`. The pages become visible only when all are written; an
        error on the way gives them back.
        """
        with self._cache.reserve(tokens, lease=lease, chain=chain, for_whom=_name(tokens)) as reservation:
            for first, pages in _runs(reservation.page_indices, reservation.device_pages):
                start = column + first * self._pool.page_tokens
                stop = start + len(pages) * self._pool.page_tokens
                for layer in range(self._pool.shape.num_layers):
                    for part in self._pool.shape.parts:
                        rows = part_of(contiguous, part, layer)[row, :, start:stop]
                        self._pool.scatter(part, layer, pages, rows)
            reservation.commit()
        return len(reservation.device_pages)


def _name(tokens: Sequence[int]) -> str:
    return f"a sequence of {len(tokens)} tokens"


def _runs(indices: Sequence[int], pages: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return runs of consecutive page indices, each with its first index and its device pages."""
    runs: list[tuple[int, list[int]]] = []
    for index, page in zip(indices, pages, strict=True):
        if runs and runs[-1][0] + len(runs[-1][1]) == index:
            runs[-1][1].append(page)
        else:
            runs.append((index, [page]))
    return runs
