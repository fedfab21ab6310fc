"""One vLLM server and the client that speaks to it and reads its counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvhoist.demo.vllm_chat import Message, Reply, ask, connect, prefill
from kvhoist.demo.vllm_server import Metrics, VllmServer

_WARM_UP = [{"role": "user", "content": "Say hello to the visitors of the museum. " * 8}]

OnStep = Callable[[str], None]


class Side:
    """A server that answers, and has answered one question already, so that no measured one pays for what is first."""

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self._client = connect(server.url)
        self._num_asked = 0
        self.poke()

    def ask(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        salt: str | None = None,
        transfer: Mapping[str, Any] | None = None,
    ) -> Reply:
        self._num_asked += 1
        return ask(self._client, messages, max_tokens=max_tokens, salt=salt, transfer=transfer)

    def prefill(self, messages: Sequence[Message], *, salt: str | None = None) -> dict[str, Any] | None:
        """Have a prompt computed, and return what is to be handed to the server that goes on."""
        self._num_asked += 1
        return prefill(self._client, messages, salt=salt)

    def poke(self) -> None:
        """Have the engine take a few steps: what it did while idle is told by the next one."""
        self.ask(_WARM_UP, max_tokens=2)

    def metrics(self) -> Metrics:
        """Return the server's counters, once all answered requests are counted."""
        return self.server.metrics_when(lambda found: found.total("vllm:request_success_total") >= self._num_asked)

    def tokens_by_tier(self) -> dict[str, float]:
        """Return the tokens that were not computed so far, by tier."""
        found = self.metrics()
        hits = {tier: found.total("vllm:kvhoist_hit_tokens_total", tier=tier) for tier in ("host", "storage")}
        return {"device": found.total("vllm:prefix_cache_hits_total"), **hits}

    def pages(self, kind: str) -> int:
        """Return how many pages the jobs of one kind have moved so far."""
        return round(self.metrics().total("vllm:kvhoist_pages_total", kind=kind))
