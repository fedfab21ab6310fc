"""One generation: prefill of what is not cached, then a token a step, for a batch of rows of different lengths.

Columns of the contiguous cache, for a row of `n` cached and `s` new prompt tokens, `P` and `S` the batch's maxima:

    | P - n: padding | n: cached | S - s: padding | s: computed | generated …

Padding columns are masked out, and `position_ids` count a row's own tokens only. Without padding no mask is passed, so
that a single prompt is computed exactly as the model would by itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch

from kvhoist.adapters.transformers.contiguous import contiguous_cache
from kvhoist.adapters.transformers.prefix import Prefix, Prefixes
from kvhoist.adapters.transformers.report import GenerationReport
from kvhoist.adapters.transformers.sampling import Sampler, Sampling
from kvhoist.adapters.transformers.shape import CacheShape, cache_keyword
from kvhoist.control.keys import TokenChain
from kvhoist.errors import TransferError

_log = logging.getLogger(__name__)

_SPARE_TOKENS = 256  # room for generated tokens that is set aside at first


class Forward:
    """The model's forward as a function of tokens, a contiguous cache, and for padded batches positions and a mask."""

    def __init__(self, model: Any, shape: CacheShape) -> None:
        self.model = model
        self.shape = shape
        self._cache_keyword = cache_keyword(model)
        accepted = signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @torch.inference_mode()
    def __call__(
        self, tokens: torch.Tensor, cache: Any, positions: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute `tokens` of shape `[batch, n]` on top of `cache`, which grows by them; return the last token's logits
        `[batch, vocabulary]`."""
        extra: dict[str, Any] = {self._cache_keyword: cache, **self._last_only}
        if mask is not None:
            extra["attention_mask"] = mask
            if self._takes_positions:
                extra["position_ids"] = positions
        logits: torch.Tensor = self.model(input_ids=tokens, use_cache=True, **extra).logits
        return logits[:, -1]


class Row:
    """One prompt of a batch and what became of it."""

    def __init__(self, prompt: Sequence[int], sampling: Sampling, salt: bytes) -> None:
        self.prompt = list(prompt)
        self.sampling = sampling
        self.sampler = Sampler(sampling)
        self.salt = salt
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.prefix: Prefix | None = None
        self.chain: TokenChain | None = None
        self.num_computed = 0  # tokens whose KV stands in the contiguous cache, none of them over a prefix that failed
        self.num_stored = 0
        self.stored_pages = 0
        self.first_token_at = self.last_token_at = 0.0

    @property
    def computed(self) -> list[int]:
        return (self.prompt + self.tokens)[: self.num_computed]

    @property
    def num_cached(self) -> int:
        return 0 if self.prefix is None else self.prefix.lease.num_tokens

    def acquire(self, prefixes: Prefixes) -> None:
        self.chain = prefixes.chain(self.salt)
        self.prefix = prefixes.acquire(self.prompt, self.chain)

    def take(self, token: int, end_tokens: Collection[int]) -> None:
        """Add the next token and see whether it is the last one."""
        self.tokens.append(token)
        self.last_token_at = time.perf_counter()
        if len(self.tokens) == 1:
            self.first_token_at = self.last_token_at
        stop_tokens = end_tokens if self.sampling.stop_tokens is None else self.sampling.stop_tokens
        if token in stop_tokens:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.sampling.max_new_tokens:
            self.finish_reason = "length"

    def report(self, started_at: float) -> GenerationReport:
        tokens = {} if self.prefix is None else self.prefix.lease.tokens_by_tier
        after_first = len(self.tokens) - 1
        seconds = self.last_token_at - self.first_token_at
        return GenerationReport(
            prompt_tokens=len(self.prompt),
            device_tokens=tokens.get("device", 0),
            host_tokens=tokens.get("host", 0),
            storage_tokens=tokens.get("storage", 0),
            recomputed_tokens=len(self.prompt) - self.num_cached,
            new_tokens=len(self.tokens),
            stored_pages=self.stored_pages,
            ttft_seconds=max(0.0, self.first_token_at - started_at),
            tokens_per_second=after_first / seconds if after_first > 0 and seconds > 0 else 0.0,
        )


class Run:
    """Computes rows to their end. `steps` is a generator: closing it, at any point, keeps what was computed and gives
    every page back."""

    def __init__(
        self, forward: Forward, prefixes: Prefixes, rows: Sequence[Row], end_tokens: Sequence[int], lock: Any
    ) -> None:
        self.rows = rows
        self.started_at = time.perf_counter()
        self._forward = forward
        self._prefixes = prefixes
        self._end_tokens = frozenset(end_tokens)
        self._lock = lock  # of the model: one forward at a time, not held while the caller has the generator's turn
        self._cache: Any = None
        self._prompt_end = 0  # the column after the prompts, the same for all rows
        self._mask: torch.Tensor | None = None

    def steps(self, cancelled: Callable[[], bool]) -> Generator[list[tuple[int, int]], None, None]:
        """Yield after each step the new (row, token) pairs, until every row is finished or `cancelled()`."""
        try:
            with self._lock:
                logits = self._prefill()
            yield self._choose(logits)
            self._store()
            while any(row.finish_reason is None for row in self.rows) and not cancelled():
                with self._lock:
                    logits = self._advance()
                yield self._choose(logits)
        finally:
            try:
                self._store()
            finally:
                for row in self.rows:
                    row.finish_reason = row.finish_reason or "cancelled"
                    if row.prefix is not None:
                        row.prefix.lease.release()
                self._cache = None  # a caller who keeps the ended stream keeps no KV by it

    def _prefill(self) -> torch.Tensor:
        for row in self.rows:
            row.acquire(self._prefixes)
        try:
            return self._compute_prompts()
        except TransferError as error:
            _log.warning("a prefix did not arrive, and what it lacks is recomputed: %s", error)
            self._cache = self._mask = None
            for row in self.rows:
                if row.prefix is not None:
                    row.prefix.keep_arrived()
        return self._compute_prompts()  # with no load under way any more: nothing can fail for that reason again

    def _compute_prompts(self) -> torch.Tensor:
        """Return the prompts' logits. A layer of a prefix is waited for when the model comes to it. Raises
        TransferError where one failed: then nothing that was computed counts."""
        num_columns = max(row.num_cached for row in self.rows)
        width = max(len(row.prompt) - row.num_cached for row in self.rows)
        room = num_columns + width + min(_SPARE_TOKENS, max(row.sampling.max_new_tokens for row in self.rows))
        self._cache = contiguous_cache(self._forward.model, self._forward.shape, len(self.rows), room)
        for number, layer in enumerate(self._cache.layers):
            layer.set_length(num_columns)
            layer.fill_late(partial(self._fill, number, num_columns))
        logits = self._compute_suffixes(num_columns, width)
        for layer in self._cache.layers:
            layer.fill_now()
        for row in self.rows:
            if row.prefix is not None:
                row.prefix.check()
        self._prompt_end = num_columns + width
        for row in self.rows:
            row.num_computed = len(row.prompt)
        return logits

    def _fill(self, layer: int, num_columns: int) -> None:
        """Write the prefixes of all rows, and the padding before them, into one layer."""
        for index, row in enumerate(self.rows):
            column = num_columns - row.num_cached
            if column:
                self._cache.layers[layer].clear(index, column)
            if row.prefix is not None and row.num_cached:
                row.prefix.fill(layer, self._cache, index, column)

    def _compute_suffixes(self, num_columns: int, width: int) -> torch.Tensor:
        suffixes = [row.prompt[row.num_cached :] for row in self.rows]
        tokens = self._tensor([[0] * (width - len(suffix)) + suffix for suffix in suffixes])
        positions = None
        if len({(row.num_cached, len(row.prompt)) for row in self.rows}) > 1:
            self._mask = self._tensor(
                [
                    [0] * (num_columns - row.num_cached)
                    + [1] * row.num_cached
                    + [0] * (width - len(suffix))
                    + [1] * len(suffix)
                    for row, suffix in zip(self.rows, suffixes, strict=True)
                ]
            )
            positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, num_columns:]
        return self._forward(tokens, self._cache, positions, self._mask)

    def _advance(self) -> torch.Tensor:
        """Compute the last chosen tokens. Finished rows ride along with their last token, unread."""
        tokens = self._tensor([[row.tokens[-1]] for row in self.rows])
        positions = None
        if self._mask is not None:
            self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
            positions = self._tensor([[len(row.prompt) + len(row.tokens) - 1] for row in self.rows])
        logits = self._forward(tokens, self._cache, positions, self._mask)
        for row in self.rows:
            if row.finish_reason is None:
                row.num_computed += 1
        return logits

    def _choose(self, logits: torch.Tensor) -> list[tuple[int, int]]:
        chosen = []
        for index, row in enumerate(self.rows):
            if row.finish_reason is None:
                row.take(row.sampler.choose(logits[index]), self._end_tokens)
                chosen.append((index, row.tokens[-1]))
        return chosen

    def _store(self) -> None:
        """Keep every row's whole pages as far as they were computed."""
        for index, row in enumerate(self.rows):
            if row.prefix is None or row.chain is None or row.num_computed == row.num_stored:
                continue
            column = self._prompt_end - len(row.prompt)
            lease = row.prefix.lease
            row.stored_pages += self._prefixes.store(row.computed, lease, row.chain, self._cache, index, column)
            row.num_stored = row.num_computed

    def _tensor(self, values: list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._forward.shape.device)
