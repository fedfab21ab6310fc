"""Request traces for vLLM servers: seeded conversations whose turns interleave, or a file in Mooncake's format.

Prompts are token ids, so that lengths are exact and no tokenizer is asked.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhoist.errors import ConfigError

_MOONCAKE_BLOCK_TOKENS = 512
_LOWEST_TOKEN = 10
"""Token ids below are often special."""

Answers = Mapping[str, Sequence[int]]
"""Token ids that were answered, by the request's name."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: `own` tokens, after those of `follows` (its prompt and its answer) where that is not None.

    `turn` counts from 1 within a conversation. `at_s`: when it arrives, None for as soon as a client is free.
    """

    name: str
    own: tuple[int, ...]
    new_tokens: int
    turn: int = 1
    follows: TraceRequest | None = None
    at_s: float | None = None

    def prompt(self, answers: Answers) -> list[int]:
        """Return the whole prompt, given what was answered before."""
        before = [] if self.follows is None else [*self.follows.prompt(answers), *answers[self.follows.name]]
        return [*before, *self.own]

    @property
    def num_prompt_tokens(self) -> int:
        before = 0 if self.follows is None else self.follows.num_prompt_tokens + self.follows.new_tokens
        return before + len(self.own)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `source` says where they come from, `num_skipped` how many were too long."""

    requests: tuple[TraceRequest, ...]
    source: str
    num_skipped: int = 0
    by_name: dict[str, TraceRequest] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {request.name: request for request in self.requests})

    @property
    def longest_tokens(self) -> int:
        """The most tokens of a request, its answer included."""
        return max(request.num_prompt_tokens + request.new_tokens for request in self.requests)

    @property
    def working_set_tokens(self) -> int:
        """The tokens of all conversations at their ends: what a cache that forgot nothing would hold."""
        followed = {request.follows.name for request in self.requests if request.follows is not None}
        last = [request for request in self.requests if request.name not in followed]
        return sum(request.num_prompt_tokens + request.new_tokens for request in last)

    def describe(self) -> dict[str, Any]:
        prompts = sorted(request.num_prompt_tokens for request in self.requests)
        return {
            "source": self.source,
            "requests": len(self.requests),
            "skipped_too_long": self.num_skipped,
            "prompt_tokens": {"least": prompts[0], "median": prompts[len(prompts) // 2], "most": prompts[-1]},
            "new_tokens": sum(request.new_tokens for request in self.requests),
            "working_set_tokens": self.working_set_tokens,
        }


@dataclass(frozen=True, slots=True)
class ConversationSizes:
    """`shared_tokens` of the first prompt are the same in all conversations, as a system prompt is."""

    conversations: int = 16
    turns: int = 4
    prompt_tokens: int = 2000
    shared_tokens: int = 0
    turn_tokens: int = 100
    new_tokens: int = 64

    def __post_init__(self) -> None:
        if min(self.conversations, self.turns, self.prompt_tokens, self.turn_tokens, self.new_tokens) < 1:
            raise ConfigError("a trace needs at least one of everything", got=str(self))
        if not 0 <= self.shared_tokens < self.prompt_tokens:
            raise ConfigError(
                "shared tokens are part of the first prompt",
                got=self.shared_tokens,
                expected=f"from 0 to {self.prompt_tokens - 1}",
            )


def conversations(sizes: ConversationSizes, vocabulary: int, seed: int) -> Trace:
    """Return conversations that take turns: the n-th turn of each, in an order of its own, before any next one."""
    rng = random.Random(seed)
    shared = _tokens(rng, sizes.shared_tokens, vocabulary)
    latest: list[TraceRequest | None] = [None] * sizes.conversations
    requests = []
    for turn in range(1, sizes.turns + 1):
        for number in rng.sample(range(sizes.conversations), sizes.conversations):
            before = latest[number]
            if before is None:
                own = (*shared, *_tokens(rng, sizes.prompt_tokens - sizes.shared_tokens, vocabulary))
            else:
                own = _tokens(rng, sizes.turn_tokens, vocabulary)
            request = TraceRequest(f"c{number}t{turn}", own, sizes.new_tokens, turn, before)
            latest[number] = request
            requests.append(request)
    return Trace(tuple(requests), f"{sizes.conversations} conversations of {sizes.turns} turns, seed {seed}")


def mooncake(path: Path, vocabulary: int, *, speed: float, most_tokens: int, most_requests: int | None) -> Trace:
    """Read a trace in Mooncake's format: JSON lines of `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

    A hash id stands for 512 tokens, the same wherever it occurs. Requests of more than `most_tokens` are left out, and
    those after `most_requests`. `speed` 2 plays twice as fast. Raises ConfigError for a file that is none.
    """
    requests: list[TraceRequest] = []
    num_skipped = 0
    first_ms: float | None = None
    for number, record in enumerate(_records(path), start=1):
        if most_requests is not None and len(requests) >= most_requests:
            break
        try:
            num_tokens, num_new = int(record["input_length"]), int(record["output_length"])
            ids, at_ms = [int(one) for one in record["hash_ids"]], float(record["timestamp"])
        except (KeyError, TypeError, ValueError) as error:
            raise _no_trace(path, number, f"{type(error).__name__}: {error}") from error
        if len(ids) < math.ceil(num_tokens / _MOONCAKE_BLOCK_TOKENS) or num_tokens < 1 or num_new < 1:
            raise _no_trace(path, number, f"{len(ids)} hash ids for {num_tokens} tokens, {num_new} new ones")
        if num_tokens + num_new > most_tokens:
            num_skipped += 1
            continue
        first_ms = at_ms if first_ms is None else first_ms
        own = [token for one in ids for token in _tokens(random.Random(one), _MOONCAKE_BLOCK_TOKENS, vocabulary)]
        at_s = (at_ms - first_ms) / 1000 / speed
        requests.append(TraceRequest(f"r{number}", tuple(own[:num_tokens]), num_new, at_s=at_s))
    if not requests:
        raise ConfigError(
            "the trace has no request that can be played",
            got=f"{path}: {num_skipped} of more than {most_tokens} tokens",
            remedy="Raise --max-tokens, or choose another trace.",
        )
    return Trace(tuple(requests), f"{path.name}, {speed:g} times as fast", num_skipped)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except json.JSONDecodeError as error:
                        raise _no_trace(path, number, str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the trace cannot be read", got=f"{path}: {error}") from error


def _no_trace(path: Path, line: int, why: str) -> ConfigError:
    return ConfigError(
        "this is no trace in Mooncake's format",
        got=f"{path}, line {line}: {why}",
        expected='{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [a number for each 512 tokens]}',
    )


def _tokens(rng: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(_LOWEST_TOKEN, vocabulary), k=count))
