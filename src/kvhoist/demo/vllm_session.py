"""A chat with a vLLM server that has kvhoist behind it, while other conversations push its prefix out of the device.

Each answer is judged beside a second server, without a connector and with a device cache so large that it keeps the
chat: there the same prefix is a hit in place, so that tokens and log probabilities must be the same bits; and a
request with a salt of its own is computed from its first token, which tells what the hit saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvhoist.demo.child import ChildProcess, stop_all
from kvhoist.demo.conversations import AFTER_RESTART, Conversation, conversations
from kvhoist.demo.page_cache import drop_page_cache
from kvhoist.demo.vllm_server import ServerOptions, VllmServer, kvhoist_connector, started
from kvhoist.demo.vllm_side import OnStep, Side

NUM_TURNS = 4
TARGET_RATIO = 0.25
"""Time to the first token of turns 2 to 4, of recomputing the same prompt."""

_OTHER_ANSWER_TOKENS = 4


@dataclass(frozen=True, slots=True)
class VllmDemoOptions:
    """`model` is a folder; `folder` the store's; `device_blocks` blocks of `block_tokens` tokens hold the chat or the
    others, not both; `plain_device_blocks` those of the server that it is compared with."""

    model: Path
    folder: Path
    logs: Path
    dtype: str
    host_bytes: int = 1 << 30
    block_tokens: int = 32
    device_blocks: int = 80
    plain_device_blocks: int = 512
    new_tokens: int = 16
    more: tuple[str, ...] = ()

    def with_kvhoist(self) -> ServerOptions:
        # A page a block, so that a prefix ends here where it ends in vLLM's own cache and the two can be compared.
        connector = kvhoist_connector(
            host_bytes=self.host_bytes, storage=f"file:{self.folder}?capacity=8GiB", blocks_per_page=1
        )
        return self._server("kvhoist", self.device_blocks, connector)

    def without(self) -> ServerOptions:
        return self._server("plain", self.plain_device_blocks, None)

    def _server(self, name: str, device_blocks: int, connector: dict[str, Any] | None) -> ServerOptions:
        return ServerOptions(
            model=self.model,
            log=self.logs / f"vllm-{name}.log",
            device_blocks=device_blocks,
            block_tokens=self.block_tokens,
            dtype=self.dtype,
            connector=connector,
            more=self.more,
        )


@dataclass(frozen=True, slots=True)
class VllmTurn:
    """One answer. Token counts by tier are the server's own; `difference` names the first bit that is not that of the
    run whose prefix was kept in place, None where none is."""

    number: int
    after_restart: bool
    prompt_tokens: int
    cached_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    ttft_seconds: float
    ttft_recomputed_seconds: float
    difference: str | None
    same_text_as_recomputed: bool
    question: str
    answer: str

    @property
    def identical(self) -> bool:
        return self.difference is None

    @property
    def ttft_ratio(self) -> float:
        return self.ttft_seconds / self.ttft_recomputed_seconds

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "identical": self.identical, "ttft_ratio": round(self.ttft_ratio, 4)}


@dataclass(frozen=True)
class VllmDemoResult:
    """All turns, the seconds that servers took to start, and those of the whole demo."""

    options: VllmDemoOptions
    turns: tuple[VllmTurn, ...]
    seconds: float
    ready_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        return all(turn.identical for turn in self.turns)

    @property
    def ttft_ratio(self) -> float:
        """The worst of the turns that had a prefix to find."""
        return round(max(turn.ttft_ratio for turn in self.turns[1:]), 4)

    def to_dict(self) -> dict[str, Any]:
        return {
            "identical": self.identical,
            "turns": [turn.to_dict() for turn in self.turns],
            "ttft_ratio": self.ttft_ratio,
            "target_ttft_ratio": TARGET_RATIO,
            "model": str(self.options.model),
            "dtype": self.options.dtype,
            "device_tokens": self.options.device_blocks * self.options.block_tokens,
            "host_bytes": self.options.host_bytes,
            "ready_seconds": {name: round(value, 1) for name, value in self.ready_seconds.items()},
            "seconds": round(self.seconds, 1),
        }


class VllmSession:
    """Plays the chat. Servers run as long as `play` does."""

    def __init__(self, options: VllmDemoOptions, *, on_step: OnStep, on_turn: Callable[[VllmTurn], None]) -> None:
        self._options = options
        self._on_step = on_step
        self._on_turn = on_turn
        self._talk, self._others = chat_and_others()
        self._turns: list[VllmTurn] = []
        self._ready_seconds: dict[str, float] = {}

    def play(self) -> VllmDemoResult:
        """Hold the whole chat. Raises ServerFailedError for a server that does not come up."""
        started_at = time.perf_counter()
        servers: list[ChildProcess] = []
        with ExitStack() as stack:
            stack.callback(stop_all, servers)
            self._on_step("starting two vLLM servers, with kvhoist and without")
            plain_server = started(self._options.without(), servers)
            server = started(self._options.with_kvhoist(), servers)
            cached, plain = self._ready(server, "kvhoist"), self._ready(plain_server, "plain")
            for _ in range(NUM_TURNS - 1):
                self._turn(cached, plain)
                self._ask_others(cached)
            server.stop()
            self._on_step("starting the server with kvhoist again, the page cache dropped")
            drop_page_cache(self._options.folder)
            server = started(self._options.with_kvhoist(), servers)
            self._turn(self._ready(server, "kvhoist again"), plain, after_restart=True)
        return VllmDemoResult(
            self._options, tuple(self._turns), time.perf_counter() - started_at, dict(self._ready_seconds)
        )

    def _ready(self, server: VllmServer, name: str) -> Side:
        server.wait_ready()
        self._ready_seconds[name] = server.ready_seconds
        return Side(server)

    def _turn(self, cached: Side, plain: Side, *, after_restart: bool = False) -> None:
        messages = self._talk.ask()
        number = self._talk.num_turns
        new_tokens = self._options.new_tokens
        self._on_step(f"question {number}: with kvhoist")
        before = cached.tokens_by_tier()
        reply = cached.ask(messages, max_tokens=new_tokens)
        after = cached.tokens_by_tier()
        self._on_step(f"question {number}: recomputing everything")
        recomputed = plain.ask(messages, max_tokens=new_tokens, salt=f"question {number}")
        self._on_step(f"question {number}: the prefix kept in place")
        kept = plain.ask(messages, max_tokens=new_tokens)
        found = {tier: round(after[tier] - before[tier]) for tier in after}
        turn = VllmTurn(
            number=number,
            after_restart=after_restart,
            prompt_tokens=reply.prompt_tokens,
            cached_tokens=reply.cached_tokens,
            device_tokens=found["device"],
            host_tokens=found["host"],
            disk_tokens=found["storage"],
            ttft_seconds=reply.ttft_seconds,
            ttft_recomputed_seconds=recomputed.ttft_seconds,
            difference=reply.difference(kept, cached_tokens=reply.cached_tokens),
            same_text_as_recomputed=reply.text == recomputed.text,
            question=messages[-1]["content"],
            answer=reply.text,
        )
        self._talk.answer(reply.text)
        self._turns.append(turn)
        self._on_turn(turn)

    def _ask_others(self, cached: Side) -> None:
        for other in self._others:
            self._on_step(f"{other.name} asks")
            other.answer(cached.ask(other.ask(), max_tokens=_OTHER_ANSWER_TOKENS).text)


def chat_and_others() -> tuple[Conversation, list[Conversation]]:
    """Return the chat, and two conversations as long that share no prefix with it or each other."""
    talks = conversations()
    reader = talks["Dora"]
    system = reader.messages[0]["content"]
    backwards = "\n\n".join(reversed(system.split("\n\n")))
    other = Conversation("Emil", list(reader.questions), [{"role": "system", "content": backwards}])
    return talks[AFTER_RESTART], [reader, other]
