"""Prefixes in and out of the model's contiguous cache, by way of the pool and the facade."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from kvhoist.adapters.transformers.contiguous import part_of
from kvhoist.adapters.transformers.pool import PagedPool
from kvhoist.cache import HierarchicalCache
from kvhoist.control.keys import TokenChain
from kvhoist.errors import TransferError
from kvhoist.lease import Lease


class Prefix:
    """Leased pages on their way into the model's own cache: a layer is waited for when it is needed, not before.

    `fill` and `check` raise TransferError where a page failed or came too late: call `keep_arrived`, and compute again
    on the shorter prefix, which is on the device as a whole.
    """

    def __init__(self, lease: Lease, pool: PagedPool, deadline: float) -> None:
        self.lease = lease
        self._pool = pool
        self._deadline = deadline
        self._pages = pool.index(lease.device_pages)

    @torch.inference_mode()
    def fill(self, layer: int, contiguous: Any, row: int, column: int) -> None:
        """Copy the pages' `layer` into row `row` of the contiguous cache, from `column` on, when it has arrived: on a
        GPU in the model's stream, which waits for that, else in this thread."""
        with self._in_time():
            self.lease.wait(self._pool.shape.group.layers[layer], timeout_s=self._left())
        for part in self._pool.shape.parts:
            out = part_of(contiguous, part, layer)[row, :, column : column + self.lease.num_tokens]
            self._pool.gather(part, layer, self._pages, out)

    def check(self) -> None:
        """Wait until every page is on the device."""
        with self._in_time():
            self.lease.check(timeout_s=self._left())

    def keep_arrived(self) -> None:
        """Shorten the prefix to the leading pages that do arrive."""
        for transfer in self.lease.transfers:
            with suppress(TimeoutError):
                transfer.result(self._left())
        self.lease.keep_arrived()
        self._pages = self._pages[: self.lease.num_pages]

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise TransferError(
                "a load came too late", got=str(error), remedy="Recompute its tokens, or raise acquire_timeout_s."
            ) from error


class Prefixes:
    """Looks up, loads and stores the pages of token sequences. Each has a chain, so that a page is hashed once.

    Without `layerwise`, which may change from one prefix to the next, a prefix has arrived before the forward begins.
    """

    def __init__(self, cache: HierarchicalCache, pool: PagedPool, *, layerwise: bool) -> None:
        self._cache = cache
        self._pool = pool
        self.layerwise = layerwise

    def chain(self, salt: bytes) -> TokenChain:
        """Return a new sequence's chain. `salt` separates those who must not share pages."""
        return TokenChain(self._pool.page_tokens, salt)

    def acquire(self, tokens: Sequence[int], chain: TokenChain) -> Prefix:
        """Begin to bring the longest cached prefix of `tokens` onto the device, and pin it. The last token is left out:
        it must be computed for its logits. A load that fails, or is late, leaves a shorter prefix."""
        deadline = time.monotonic() + self._cache.config.acquire_timeout_s
        match = self._cache.match(tokens, chain=chain, max_tokens=len(tokens) - 1)
        lease = self._cache.acquire(match, layerwise=self.layerwise, for_whom=_name(tokens))
        try:
            return Prefix(lease, self._pool, deadline)
        except BaseException:
            lease.release()
            raise

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
                index = self._pool.index(pages)
                start = column + first * self._pool.page_tokens
                stop = start + len(pages) * self._pool.page_tokens
                for layer in range(self._pool.shape.num_layers):
                    for part in self._pool.shape.parts:
                        rows = part_of(contiguous, part, layer)[row, :, start:stop]
                        self._pool.scatter(part, layer, index, rows)
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
