"""Plays a trace against a vLLM server and takes the times that a user of it would see."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvhoist.demo.vllm_server import MODEL_NAME
from kvhoist.demo.vllm_trace import Answers, Trace, TraceRequest
from kvhoist.errors import KvhoistError, MissingDependencyError

_TIMEOUT_S = 1800.0


class RequestFailedError(KvhoistError):
    """The server refused a request, or broke off its answer."""


@dataclass(frozen=True, slots=True)
class Served:
    """What one request got. `gaps_s` are the times between the arrivals of its tokens, `cached_tokens` those of its
    prompt that the server says it did not compute."""

    request: TraceRequest
    tokens: tuple[int, ...]
    ttft_s: float
    gaps_s: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Played:
    """A trace as it was served, in `seconds` from the first request to the last token."""

    served: list[Served] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def answers(self) -> dict[str, tuple[int, ...]]:
        return {one.request.name: one.tokens for one in self.served}

    def figures(self) -> dict[str, Any]:
        """Return times in ms, tokens a second, and the share of prompt tokens that were hits."""
        later = [one.ttft_s for one in self.served if one.request.turn > 1]
        prompt_tokens = sum(one.prompt_tokens for one in self.served)
        return {
            "seconds": round(self.seconds, 2),
            "output_tokens_per_s": round(sum(len(one.tokens) for one in self.served) / self.seconds, 2),
            "ttft_ms": percentiles([one.ttft_s for one in self.served]),
            "ttft_later_turns_ms": percentiles(later) if later else None,
            "itl_ms": percentiles([gap for one in self.served for gap in one.gaps_s]),
            "prompt_tokens": prompt_tokens,
            "cached_tokens": sum(one.cached_tokens for one in self.served),
            "cached_share": round(sum(one.cached_tokens for one in self.served) / prompt_tokens, 4),
        }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return mean, median and 99th percentile in ms (of few values the greatest); None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    p99 = ordered[max(0, math.ceil(0.99 * len(ordered)) - 1)]
    figures = {"mean": statistics.mean(ordered), "p50": statistics.median(ordered), "p99": p99}
    return {name: round(value * 1000, 3) for name, value in figures.items()}


def play(
    url: str,
    trace: Trace,
    *,
    clients: int,
    answers: Answers | None = None,
    on_served: Callable[[Served], None] = lambda _: None,
) -> Played:
    """Serve the whole trace by the server at `url` and return what came of it.

    Requests without a time are sent in order by `clients` clients, each as soon as it is free; a turn waits for the one
    before it. `answers` stand in prompts instead of what this server answered, so that it gets the prompts that another
    got. Raises RequestFailedError, MissingDependencyError.
    """
    try:
        import aiohttp
    except ImportError as error:
        raise MissingDependencyError("the load needs aiohttp, which vLLM brings", got=str(error)) from error
    try:
        return asyncio.run(_play(aiohttp, url, trace, clients, answers, on_served))
    except ExceptionGroup as group:
        first = group.exceptions[0]
        if isinstance(first, aiohttp.ClientError | TimeoutError):
            raise RequestFailedError("the server did not answer", got=f"{type(first).__name__}: {first}") from first
        raise first from None


async def _play(
    aiohttp: Any, url: str, trace: Trace, clients: int, answers: Answers | None, on_served: Callable[[Served], None]
) -> Played:
    played = Played()
    own: dict[str, Sequence[int]] = {}
    done = {name: asyncio.Event() for name in trace.by_name}
    waiting = iter(trace.requests)
    began = time.perf_counter()

    async def serve(session: Any, request: TraceRequest) -> None:
        if request.follows is not None:
            await done[request.follows.name].wait()
        if request.at_s is not None:
            await asyncio.sleep(max(0.0, request.at_s - (time.perf_counter() - began)))
        served = await _serve(session, url, request, request.prompt(own if answers is None else answers))
        own[request.name] = served.tokens
        done[request.name].set()
        played.served.append(served)
        on_served(served)

    async def client(session: Any) -> None:
        for request in waiting:
            await serve(session, request)

    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    timed = trace.requests[0].at_s is not None
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as tasks,
    ):
        if timed:
            for request in trace.requests:
                tasks.create_task(serve(session, request))
        else:
            for _ in range(clients):
                tasks.create_task(client(session))
    played.seconds = time.perf_counter() - began
    return played


async def _serve(session: Any, url: str, request: TraceRequest, prompt: list[int]) -> Served:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": request.new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    tokens: list[int] = []
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    began = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise RequestFailedError(
                f"the server refused request {request.name}", got=f"{answer.status}: {(await answer.text())[:500]}"
            )
        async for event in _events(answer.content):
            usage = event.get("usage") or usage
            if "error" in event:
                raise RequestFailedError(f"the server failed request {request.name}", got=event["error"])
            for choice in event.get("choices", ()):
                new = choice.get("token_ids") or ()
                if new:
                    arrivals += [time.perf_counter()] * len(new)
                    tokens += new
    if len(tokens) != request.new_tokens:
        raise RequestFailedError(
            f"the answer to {request.name} broke off", got=f"{len(tokens)} tokens", expected=request.new_tokens
        )
    details = usage.get("prompt_tokens_details") or {}
    return Served(
        request,
        tuple(tokens),
        arrivals[0] - began,
        tuple(later - earlier for earlier, later in itertools.pairwise(arrivals)),
        len(prompt),
        details.get("cached_tokens") or 0,
    )


async def _events(lines: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Parse server-sent events."""
    async for line in lines:
        text = line.strip()
        if text.startswith(b"data:") and text != b"data: [DONE]":
            event: dict[str, Any] = json.loads(text[5:])
            yield event
