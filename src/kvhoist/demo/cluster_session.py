"""Two vLLM servers on one Mooncake cluster: what A computed B loads; A prefills and B decodes; A and the master fail.

A only persists (`kv_producer`), B only loads (`kv_consumer`). Each answer of B is judged beside the same question asked
of A alone, which computed the prompt and so has its prefix in its device cache, in place: tokens and log probabilities
must be the same bits, and as many tokens cached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhoist.demo.child import ChildProcess, stop_all
from kvhoist.demo.cluster import HOSTS, Cluster
from kvhoist.demo.cluster_result import RECOVERY_TIMEOUT_S, ClusterResult, ClusterRow
from kvhoist.demo.conversations import Conversation
from kvhoist.demo.vllm_chat import Message, Reply
from kvhoist.demo.vllm_server import ServerOptions, kvhoist_connector, started
from kvhoist.demo.vllm_session import chat_and_others
from kvhoist.demo.vllm_side import OnStep, Side

_PERSIST_TIMEOUT_S = 60.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """`model` is a folder. Each server has `device_blocks` blocks of `block_tokens` tokens and a host tier of its own;
    each of two lenders of memory holds `segment_bytes` of shared pages."""

    model: Path
    logs: Path
    dtype: str
    host_bytes: int = 512 << 20
    segment_bytes: int = 512 << 20
    block_tokens: int = 32
    device_blocks: int = 256
    new_tokens: int = 16

    def server(self, name: str, store: str) -> ServerOptions:
        """Return what server A or B serves, with its pages in `store`."""
        connector = kvhoist_connector(
            role="kv_producer" if name == "A" else "kv_consumer",
            host_bytes=self.host_bytes,
            storage=store,
            lookup_timeout_s=5.0,  # a CPU that both servers and the store share may take so long over A's last pages
            blocks_per_page=1,  # so that a prefix ends where it ends in vLLM's own cache, and the two can be compared
        )
        return ServerOptions(
            model=self.model,
            log=self.logs / f"vllm-{name}.log",
            device_blocks=self.device_blocks,
            block_tokens=self.block_tokens,
            dtype=self.dtype,
            connector=connector,
            host=HOSTS["AB".index(name)],
        )


@contextmanager
def running(options: ClusterOptions) -> Iterator[tuple[Cluster, Side, Side]]:
    """Start a cluster and servers A and B; end them all on leaving. Raises ServerFailedError for a program
    that does not come up."""
    cluster = Cluster(options.logs, options.segment_bytes)
    servers: list[ChildProcess] = []
    with ExitStack() as stack:
        stack.callback(cluster.stop)
        stack.callback(stop_all, servers)
        cluster.start()
        first, second = (
            started(options.server(name, cluster.url(host)), servers) for name, host in zip("AB", HOSTS, strict=True)
        )
        for server in (first, second):
            server.wait_ready()
        yield cluster, Side(first), Side(second)


def play(options: ClusterOptions, *, on_step: OnStep, on_row: Callable[[ClusterRow], None]) -> ClusterResult:
    """Start all, hold the whole session, and end all. Raises ServerFailedError."""
    began = time.perf_counter()
    on_step("starting Mooncake and two vLLM servers")
    with running(options) as (cluster, first, second):
        session = ClusterSession(cluster, first, second, options.new_tokens, on_step=on_step, on_row=on_row)
        session.play()
    session.result.seconds = time.perf_counter() - began
    return session.result


class ClusterSession:
    """The session on servers that run; `result` is what came of it so far."""

    def __init__(
        self,
        cluster: Cluster,
        first: Side,
        second: Side,
        new_tokens: int,
        *,
        on_step: OnStep,
        on_row: Callable[[ClusterRow], None],
    ) -> None:
        self.result = ClusterResult()
        self._cluster = cluster
        self._a, self._b = first, second
        self._new_tokens = new_tokens
        self._on_step = on_step
        self._on_row = on_row
        self._chat, (self._other, _) = chat_and_others()

    def play(self) -> None:
        self.share(self._chat)
        self.split(self._other)
        self.split(self._chat)
        self.lose_master()
        self.lose_prefiller()

    def share(self, talk: Conversation) -> None:
        """A answers a conversation's next question, then B does, when A's pages are in the store."""
        messages = talk.ask()
        self._on_step("A answers")
        kept_pages = self._a.pages("persist")
        answer = self._a.ask(messages, max_tokens=self._new_tokens)
        self._on_step("A's pages go to the store")
        self._await_persisted(kept_pages + answer.prompt_tokens // self._block_tokens)
        self._on_step("B answers the same")
        self._judge("A answered, B loads", messages, recomputed=self._recompute(messages))
        talk.answer(answer.text)

    def split(self, talk: Conversation) -> None:
        """A router has A prefill a conversation's next question, and B go on at once."""
        messages = talk.ask()
        what = f"A prefills, B decodes: {talk.name} {talk.num_turns}"
        self._on_step(what)
        reply = self._judge(what, messages, routed=True, recomputed=self._recompute(messages))
        talk.answer(reply.text)

    def lose_master(self) -> None:
        """Both servers go on computing without the master, and share again when it is back."""
        messages = self._chat.ask()
        self._on_step("the master is killed")
        self._cluster.master.kill()
        transfer, prefill_s = self._prefill(messages, "no master")
        before = self._b.tokens_by_tier()
        reply = self._b.ask(messages, max_tokens=self._new_tokens, salt="no master", transfer=transfer)
        self._on_step("B recomputes")
        recomputed = self._recompute(messages)
        # Both computed the whole prompt.
        self._add("the master is gone", reply, before, recomputed, recomputed, prefill_s, loads=False)
        self._on_step("the master is back")
        self._cluster.restart_master()
        self._await_recovery()
        self._judge("the master is back", messages, salt="master back", routed=True, recomputed=recomputed)

    def lose_prefiller(self) -> None:
        """What A wrote outlives it."""
        messages = self._chat.messages
        self._on_step("A writes, and is killed")
        kept_pages = self._a.pages("persist")
        self._prefill(messages, "A killed")
        kept = self._a.ask(messages, max_tokens=self._new_tokens, salt="A killed")
        self._await_persisted(kept_pages + kept.prompt_tokens // self._block_tokens)
        self._note_pages("A", self._a)
        self._a.server.kill()
        self._on_step("B answers what A wrote")
        before = self._b.tokens_by_tier()
        reply = self._b.ask(messages, max_tokens=self._new_tokens, salt="A killed")
        self._add("A is gone", reply, before, kept, self._recompute(messages), 0.0)
        self._note_pages("B", self._b)

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _block_tokens(self) -> int:
        return self._a.server.options.block_tokens

    def _judge(
        self,
        what: str,
        messages: list[Message],
        *,
        recomputed: Reply,
        salt: str | None = None,
        routed: bool = False,
    ) -> Reply:
        """Ask B, by way of A where it is `routed`, then A alone, and add a row."""
        transfer, prefill_s = self._prefill(messages, salt) if routed else (None, 0.0)
        before = self._b.tokens_by_tier()
        reply = self._b.ask(messages, max_tokens=self._new_tokens, salt=salt, transfer=transfer)
        self._on_step(f"{what}: A alone")
        kept = self._a.ask(messages, max_tokens=self._new_tokens, salt=salt)
        self._add(what, reply, before, kept, recomputed, prefill_s)
        return reply

    def _add(
        self,
        what: str,
        reply: Reply,
        before: Mapping[str, float],
        kept: Reply,
        recomputed: Reply,
        prefill_s: float,
        *,
        loads: bool = True,
    ) -> None:
        after = self._b.tokens_by_tier()
        found = {tier: round(after[tier] - before[tier]) for tier in after}
        num_cached = sum(found.values())
        problem = reply.difference(kept, cached_tokens=num_cached)
        if problem is None and not prefill_s and reply.cached_tokens != num_cached:  # else it tells A's
            problem = f"the answer says that {reply.cached_tokens} tokens were cached, the counters {num_cached}"
        if problem is None and reply.text != recomputed.text:
            problem = "another text than recomputing"
        if problem is None and bool(found["storage"]) != loads:
            problem = f"{found['storage']} tokens came from the store"
        row = ClusterRow(
            what=what,
            prompt_tokens=reply.prompt_tokens,
            device_tokens=found["device"],
            host_tokens=found["host"],
            stored_tokens=found["storage"],
            prefill_seconds=prefill_s,
            ttft_seconds=reply.ttft_seconds,
            ttft_recomputed_seconds=recomputed.ttft_seconds,
            problem=problem,
        )
        self.result.rows.append(row)
        self._on_row(row)

    def _recompute(self, messages: list[Message]) -> Reply:
        """Have B compute a prompt whose prefix it finds nowhere."""
        return self._b.ask(messages, max_tokens=self._new_tokens, salt=f"recompute {len(self.result.rows)}")

    def _prefill(self, messages: list[Message], salt: str | None) -> tuple[dict[str, Any] | None, float]:
        began = time.perf_counter()
        transfer = self._a.prefill(messages, salt=salt)
        return transfer, time.perf_counter() - began

    def _await_persisted(self, num_pages: int) -> None:
        """Wait until A has told that it persisted so many pages and has no job left; an idle engine tells with its next
        step. What does not come shows in what B loads."""
        deadline = time.monotonic() + _PERSIST_TIMEOUT_S
        while time.monotonic() < deadline:
            self._a.poke()
            told = self._a.metrics()
            if self._a.pages("persist") >= num_pages and not told.total("vllm:kvhoist_open_jobs"):
                return
            time.sleep(_POLL_S)

    def _await_recovery(self) -> None:
        """Have short prompts prefilled by A until B loads one."""
        began = time.monotonic()
        messages = [{"role": "user", "content": "How long is the causeway to the lighthouse? " * 8}]
        while time.monotonic() - began < RECOVERY_TIMEOUT_S:
            salt = f"again {time.monotonic() - began}"
            before = self._b.tokens_by_tier()["storage"]
            self._b.ask(messages, max_tokens=2, salt=salt, transfer=self._prefill(messages, salt)[0])
            if self._b.tokens_by_tier()["storage"] > before:
                self.result.recovery_seconds = round(time.monotonic() - began, 1)
                return
            time.sleep(_POLL_S)

    def _note_pages(self, name: str, side: Side) -> None:
        side.poke()
        self.result.pages[name] = {kind: side.pages(kind) for kind in ("offload", "persist", "prefetch", "load")}
