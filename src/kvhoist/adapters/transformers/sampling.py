"""How the next token is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import index as as_index
from types import UnionType
from typing import Any

import torch

from kvhoist.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a generation chooses its tokens and when it stops.

    `temperature` 0 is greedy. `top_k` keeps the k likeliest tokens, `top_p` the fewest whose probabilities reach p, in
    this order. With `seed`, the same prompt gives the same tokens. A generation stops after `max_new_tokens`, or at one
    of `stop_tokens` (None: the model's own end tokens; `()`: none). Raises ConfigError for values out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, type | UnionType, Callable[[Any], bool], str], ...] = (
            ("max_new_tokens", int, lambda n: n >= 1, "an int of at least 1"),
            ("temperature", int | float, lambda t: 0 <= t < float("inf"), "0 (greedy) or more"),
            ("top_k", int | None, lambda k: k is None or k >= 1, "an int of at least 1, or None"),
            ("top_p", int | float | None, lambda p: p is None or 0 < p <= 1, "more than 0 and at most 1, or None"),
            ("seed", int | None, lambda s: s is None or -(1 << 63) <= s < 1 << 63, "an int of 64 bits, or None"),
        )
        for name, kind, fits, expected in checks:
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool) or not fits(value):
                raise ConfigError(f"{name} is out of range", got=repr(value), expected=expected)
        if self.stop_tokens is not None:
            object.__setattr__(self, "stop_tokens", _ids_of(self.stop_tokens))


def _ids_of(tokens: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(map(as_index, tokens))
    except TypeError as error:
        raise ConfigError("stop_tokens are no token ids", got=repr(tokens), expected="ints, or None") from error


GREEDY = Sampling()


class Sampler:
    """Chooses the tokens of one sequence; its random numbers depend on the seed alone, not on the batch around it."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """Return the next token for `logits` of shape `[vocabulary]`."""
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        # In double and below 0: the smallest temperature gives -inf at worst, and never NaN.
        scores = logits.double().cpu()
        scores = (scores - scores.max()) / self._sampling.temperature
        if self._sampling.top_k is not None and self._sampling.top_k < scores.numel():
            least = scores.topk(self._sampling.top_k).values[-1]
            scores = scores.masked_fill(scores < least, float("-inf"))
        if self._sampling.top_p is not None:
            ordered, order = scores.softmax(0).sort(descending=True)
            past = ordered.cumsum(0) - ordered >= self._sampling.top_p
            past[0] = False
            scores[order[past]] = float("-inf")
        return int(torch.multinomial(scores.softmax(0), 1, generator=self._generator))
