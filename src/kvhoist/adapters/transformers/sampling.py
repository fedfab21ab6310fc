"""How the next token is chosen."""

from __future__ import annotations

from dataclasses import dataclass

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
        checks = (
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "at least 1, or None"),
            ("top_p", self.top_p, self.top_p is None or 0 < self.top_p <= 1, "more than 0 and at most 1, or None"),
        )
        for name, value, fits, expected in checks:
            if not fits:
                raise ConfigError(f"{name} is out of range", got=value, expected=expected)
        if self.stop_tokens is not None:
            object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))


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
        scores = logits.float().cpu() / self._sampling.temperature
        if self._sampling.top_k is not None and self._sampling.top_k < scores.numel():
            least = scores.topk(self._sampling.top_k).values[-1]
            scores = scores.masked_fill(scores < least, float("-inf"))
        if self._sampling.top_p is not None:
            ordered, order = scores.softmax(0).sort(descending=True)
            past = ordered.cumsum(0) - ordered >= self._sampling.top_p
            scores[order[past]] = float("-inf")
        return int(torch.multinomial(scores.softmax(0), 1, generator=self._generator))
