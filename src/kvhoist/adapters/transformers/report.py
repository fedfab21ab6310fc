"""What one generation gives back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """Where a prompt's KV came from, and how long it took.

    `device_tokens`, `host_tokens`, `storage_tokens` and `recomputed_tokens` add up to `prompt_tokens`; the last token
    is always recomputed. `ttft_seconds` runs from the call to the first token, look-up and loading included;
    `tokens_per_second` is the rate of the tokens after the first. `stored_pages` were newly put on the device.
    """

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    storage_tokens: int
    recomputed_tokens: int
    new_tokens: int
    stored_pages: int
    ttft_seconds: float
    tokens_per_second: float

    @property
    def cached_tokens(self) -> int:
        return self.prompt_tokens - self.recomputed_tokens

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Generation:
    """The new tokens of one prompt, an end token included; their text where there is a tokenizer, else empty.
    `finish_reason` is `"stop"` (an end token), `"length"` or `"cancelled"`."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    report: GenerationReport
