"""One question to an OpenAI server, streamed: the answer, its tokens' log probabilities, and how soon it began."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvhoist.demo.vllm_server import MODEL_NAME
from kvhoist.errors import MissingDependencyError

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. `cached_tokens` are those of the prompt that the server did not compute, by its own account."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    ttft_seconds: float
    seconds: float

    def difference(self, kept: Reply, *, cached_tokens: int) -> str | None:
        """Return where this answer, of whose prompt `cached_tokens` were not computed, is not that of the run whose
        prefix was kept in place; None where as much was cached, and tokens and log probabilities are the same bits."""
        if cached_tokens != kept.cached_tokens:
            return f"{cached_tokens} tokens were cached, {kept.cached_tokens} where the prefix was kept in place"
        if len(self.tokens) != len(kept.tokens):
            return f"{len(self.tokens)} and {len(kept.tokens)} tokens"
        for step, (ours, theirs) in enumerate(zip(self.tokens, kept.tokens, strict=True)):
            if ours != theirs:
                return f"token {step}: {ours!r} and {theirs!r}"
        for step, (mine, its) in enumerate(zip(self.logprobs, kept.logprobs, strict=True)):
            if mine != its:
                return f"the log probability of token {step}: {mine} and {its}"
        return None


def connect(url: str) -> Any:
    """Return an `openai` client of the server at `url`. Raises MissingDependencyError without that package."""
    try:
        from openai import OpenAI
    except ImportError as error:
        raise MissingDependencyError(
            "the demo speaks to the server by the openai client", remedy="Run: pip install openai."
        ) from error
    return OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0)


def ask(
    client: Any,
    messages: Sequence[Message],
    *,
    max_tokens: int,
    salt: str | None = None,
    transfer: Mapping[str, Any] | None = None,
) -> Reply:
    """Ask greedily and read the stream to its end. A request with a `salt` shares no cached prefix with those that have
    another; `transfer` is what the server that prefilled the prompt said."""
    tokens: list[str] = []
    logprobs: list[float] = []
    text, ttft_seconds = "", 0.0
    usage: Any = None
    started_at = time.perf_counter()
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=list(messages),
        max_tokens=max_tokens,
        temperature=0,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=_extra(cache_salt=salt, kv_transfer_params=transfer),
    )
    with stream:  # a server does not end before its streams do
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                if choice.logprobs is not None and choice.logprobs.content:
                    ttft_seconds = ttft_seconds or time.perf_counter() - started_at
                    tokens += [entry.token for entry in choice.logprobs.content]
                    logprobs += [entry.logprob for entry in choice.logprobs.content]
    details = usage.prompt_tokens_details
    return Reply(
        text=text,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        ttft_seconds=ttft_seconds,
        seconds=time.perf_counter() - started_at,
    )


def prefill(client: Any, messages: Sequence[Message], *, salt: str | None = None) -> dict[str, Any] | None:
    """Have a prompt computed for another server to go on with, and return what this one says to that: None where it
    says nothing."""
    answer = client.chat.completions.create(
        model=MODEL_NAME,
        messages=list(messages),
        max_tokens=1,
        temperature=0,
        extra_body=_extra(cache_salt=salt, kv_transfer_params={"do_remote_decode": True}),
    )
    said: dict[str, Any] | None = answer.model_extra.get("kv_transfer_params")
    return said


def _extra(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
