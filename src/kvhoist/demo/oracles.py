"""Two judges of a generation with kvhoist, which share no code with what they judge but the model itself.

(a) Kept in memory: the same chunks computed on a prefix whose KV was simply kept. Logits and KV must be bit-equal.
(b) Recomputed: everything computed afresh. Greedy text must be equal in fp32; in bf16 the other shapes of the matrix
    products round differently, so that there (a) decides and (b) is only told.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from transformers import DynamicCache

from kvhoist.adapters.transformers import CachedModel
from kvhoist.adapters.transformers.shape import cache_keyword

LayerKV = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Trace:
    """What a computation gave: its tokens, the logits that each was chosen from, and at the end the KV of all layers,
    `[1, heads, tokens, head_dim]` each."""

    tokens: tuple[int, ...]
    logits: tuple[torch.Tensor, ...]
    kv: tuple[LayerKV, ...]
    ttft_seconds: float

    def digest(self) -> str:
        """Return a hash of all bits, to compare with a computation of another process."""
        found = sha256()
        for tensor in (*self.logits, *(t for layer in self.kv for t in layer)):
            found.update(_bits(tensor).numpy().tobytes())
        return found.hexdigest()


def first_difference(one: Trace, other: Trace) -> str | None:
    """Return where two traces differ in a bit, None where they are equal."""
    if len(one.logits) != len(other.logits):
        return f"{len(one.logits)} and {len(other.logits)} steps"
    for layer, (ours, theirs) in enumerate(zip(one.kv, other.kv, strict=True)):
        for name, a, b in zip("kv", ours, theirs, strict=True):
            if not same_bits(a, b):
                return f"{name} of layer {layer}"
    for step, (a, b) in enumerate(zip(one.logits, other.logits, strict=True)):
        if not same_bits(a, b):
            return f"logits of step {step}"
    return None


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether shapes, dtypes and all bits are equal (other than torch.equal: NaN equals itself, 0.0 not -0.0)."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)


class Recorder:
    """Stands in for a CachedModel's forward and keeps what it gave, for the oracles."""

    def __init__(self, cached: CachedModel) -> None:
        self._forward = cached.forward
        self.model, self.shape = cached.model, cached.shape
        self._logits: list[torch.Tensor] = []
        self._cache: Any = None
        cached.forward = self  # type: ignore[assignment]

    def __call__(self, tokens: torch.Tensor, cache: Any, *rest: Any) -> torch.Tensor:
        if cache is not self._cache:
            self._cache, self._logits = cache, []
        logits = self._forward(tokens, cache, *rest)
        self._logits.append(logits[0].clone())
        return logits

    def trace(self, tokens: Sequence[int], ttft_seconds: float) -> Trace:
        """Return the last generation of one prompt, of which `tokens` are the new ones."""
        kv = tuple((layer.keys, layer.values) for layer in self._cache.layers)
        return Trace(tuple(tokens), tuple(self._logits), kv, ttft_seconds)


class KeptInMemory:
    """Oracle (a): keeps the KV of every page it ever computed, and computes on the stock cache of transformers."""

    def __init__(self, model: Any, page_tokens: int) -> None:
        self._model = model
        self._page_tokens = page_tokens
        self._pages: dict[tuple[int, ...], list[LayerKV]] = {}  # by all tokens up to the page's end

    def replay(self, prompt: Sequence[int], num_cached: int, num_new: int) -> Trace:
        """Compute `num_new` greedy tokens for `prompt`, whose first `num_cached` tokens are taken as they were kept."""
        stops = range(self._page_tokens, num_cached + 1, self._page_tokens)
        pages = [self._pages[tuple(prompt[:stop])] for stop in stops]
        prefix = None
        if pages:
            prefix = [
                tuple(torch.cat([page[layer][part] for page in pages], dim=2) for part in range(2))
                for layer in range(len(pages[0]))
            ]
        trace = greedy(self._model, prompt, num_new, prefix=prefix)
        self._keep([*prompt, *trace.tokens[:-1]], num_cached, trace.kv)
        return trace

    def _keep(self, tokens: Sequence[int], start: int, kv: Sequence[LayerKV]) -> None:
        for first in range(start, len(tokens) - self._page_tokens + 1, self._page_tokens):
            columns = slice(first, first + self._page_tokens)
            kept = [(k[:, :, columns].clone(), v[:, :, columns].clone()) for k, v in kv]
            self._pages[tuple(tokens[: columns.stop])] = kept


@torch.inference_mode()
def greedy(
    model: Any,
    prompt: Sequence[int],
    num_new: int,
    *,
    prefix: Sequence[Sequence[torch.Tensor]] | None = None,
    end_tokens: Collection[int] = (),
) -> Trace:
    """Compute `num_new` greedy tokens (or up to one of `end_tokens`) with the stock cache: oracle (b), and with
    `prefix`, the KV of the prompt's first tokens, what (a) stands on."""
    keyword = cache_keyword(model)
    started_at = time.perf_counter()
    cache = DynamicCache(prefix, config=model.config) if prefix else DynamicCache(config=model.config)
    tokens: list[int] = []
    logits: list[torch.Tensor] = []
    ttft_seconds = 0.0
    step = list(prompt[cache.get_seq_length() :])
    while len(tokens) < num_new and not (tokens and tokens[-1] in end_tokens):
        ids = torch.tensor([step], dtype=torch.long, device=model.device)
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{keyword: cache})
        logits.append(output.logits[0, -1].clone())
        tokens.append(int(logits[-1].argmax()))
        ttft_seconds = ttft_seconds or time.perf_counter() - started_at
        step = tokens[-1:]
    kv = tuple((layer.keys, layer.values) for layer in cache.layers)
    return Trace(tuple(tokens), tuple(logits), kv, ttft_seconds)
