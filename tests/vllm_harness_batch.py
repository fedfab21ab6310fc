"""What a simulated rank computes: its requests' tokens and block tables, and a forward over KV made of hashes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm_harness_kv import KvTensors
from vllm_harness_model import Context, KvBytes, draft_tokens, next_state, next_token

_GARBAGE = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
_HISTORY = 12


@dataclass(slots=True)
class Setup:
    """What the workers of one engine share: how they are built, and what tests look at.

    `weights` is part of every context's hash, so that changing it stands for a reload of other weights.
    """

    layout: str
    tp: int = 1
    pp: int = 1
    late: bool = False
    v2: bool = False
    salts: dict[str, str] = field(default_factory=dict)
    weights: str = ""
    contexts: dict[str, Context] = field(default_factory=dict)
    checked_slots: int = 0
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class Wrong:
    """A slot that held other bytes than attention had to find there. `blocks` are all that the request read."""

    request_id: str
    blocks: frozenset[int]
    position: int
    block: int
    layer: str
    rank: int
    text: str


@dataclass(slots=True)
class _Request:
    context: Context
    blocks: list[int]
    num_prompt: int
    drafts: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Planned:
    request_id: str
    request: _Request
    start: int
    stop: int
    num_drafts: int
    drafts: list[int]
    states: list[int]
    poisoned: bool = False


class SimBatch:
    """The requests of one rank. `update` follows a scheduler's output, `forward` writes and reads KV, `sample` says the
    next tokens; `wrong` collects what was read wrongly, and a request that has read so computes nothing right from
    there on, as in a real model."""

    def __init__(
        self, setup: Setup, kv: KvTensors, kv_bytes: KvBytes, rank: int, *, is_async: bool, num_spec: int
    ) -> None:
        self.setup = setup
        self.kv = kv
        self.rank = rank
        self.wrong: list[Wrong] = []
        self.block_history: dict[int, deque[str]] = {}
        self._bytes = kv_bytes
        self._is_async = is_async
        self._num_spec = num_spec
        self._requests: dict[str, _Request] = {}
        self._batch: set[str] = set()
        self._planned: list[_Planned] = []
        self._fresh: dict[str, int] = {}

    def sample(self) -> tuple[list[str], list[list[int]], list[list[int]]]:
        """Return the ids of the step's requests, what is sampled for each, and what is drafted to follow."""
        sampled = [self._sample(planned) for planned in self._planned]
        ids = [planned.request_id for planned in self._planned]
        return ids, sampled, [list(planned.request.drafts) for planned in self._planned]

    def update(self, output: Any) -> None:
        """Follow the scheduler's output as the real runner's `_update_states` does, and plan the forward."""
        for name in output.finished_req_ids:
            self._requests.pop(name, None)
            self._batch.discard(name)
        computed: dict[str, int] = {}
        fresh: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids if self.setup.v2 and new.prefill_token_ids else new.prompt_token_ids)
            context = Context(tokens, self.setup.weights + self.setup.salts.get(new.req_id, ""))
            self._requests[new.req_id] = _Request(context, list(new.block_ids[0]), len(new.prompt_token_ids))
            self.setup.contexts[new.req_id] = context
            computed[new.req_id] = new.num_computed_tokens
            fresh[new.req_id] = 0
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            fresh[name] = self._update_cached(name, i, cached)
            computed[name] = cached.num_computed_tokens[i]
        self._batch = set(output.num_scheduled_tokens)
        scheduled = output.num_scheduled_tokens
        self._planned = [self._plan(name, count, computed[name], output) for name, count in scheduled.items()]
        self._fresh = fresh

    def _update_cached(self, name: str, i: int, cached: Any) -> int:
        """Update a request that this rank knows; returns the index of its first block that is new to it."""
        request = self._requests[name]
        resumed = name in cached.resumed_req_ids
        if (name not in self._batch or resumed) and name in cached.all_token_ids:
            request.context.replace(cached.all_token_ids[name])
            request.drafts = []
        elif cached.num_output_tokens[i] < len(request.context) - request.num_prompt:
            request.context.truncate(request.num_prompt + cached.num_output_tokens[i])
        new = cached.new_block_ids[i]
        if resumed:
            request.blocks = list(new[0])
            return 0
        first = len(request.blocks)
        if new is not None:
            request.blocks.extend(new[0])
        return first

    def _plan(self, name: str, count: int, computed: int, output: Any) -> _Planned:
        request = self._requests[name]
        context = request.context
        drafts = list(output.scheduled_spec_decode_tokens.get(name, ()))
        num_drafts = len(drafts)
        if self._is_async and request.drafts:
            drafts = request.drafts[:num_drafts]
        # A release that schedules ahead of rejected drafts counts them as computed until it hears better.
        start = min(computed, len(context) - 1) if self._is_async and self._num_spec else computed
        states = list(context.states)
        for token in drafts:
            states.append(next_state(states[-1], token))
        stop = start + count
        if stop > len(states) or stop > len(request.blocks) * self.kv.block_tokens:
            raise AssertionError(
                f"{name}: positions {start}..{stop} planned, {len(context)} tokens + {len(drafts)} drafts known, "
                f"{len(request.blocks)} blocks of {self.kv.block_tokens}"
            )
        return _Planned(name, request, start, stop, num_drafts, drafts, states[:stop])

    def scribble(self) -> None:
        """Fill the blocks that this step begins to write with garbage: whoever still reads them copies that."""
        size = self.kv.block_tokens
        for planned in self._planned:
            first = max(-(-planned.start // size), self._fresh[planned.request_id])
            blocks = planned.request.blocks[first:]
            if blocks:
                self.kv.fill(blocks, _GARBAGE)
                self._note(blocks, f"given to {planned.request_id} from index {first}")

    def _note(self, blocks: list[int], text: str) -> None:
        for block in blocks:
            history = self.block_history.setdefault(block, deque(maxlen=_HISTORY))
            history.append(f"step {self.setup.num_steps}: {text}")

    def forward(self, connector: Any) -> None:
        rows = [self._bytes.of_states(planned.states) for planned in self._planned]
        for i, name in enumerate(self.kv.layer_names):
            for planned, row in zip(self._planned, rows, strict=True):
                written = row[planned.start :, i]
                blocks = planned.request.blocks
                self.kv.write(i, blocks, planned.start, ~written if planned.poisoned else written)
            if connector is not None:
                connector.wait_for_layer_load(name)
            for planned, row in zip(self._planned, rows, strict=True):
                self._attend(i, planned, row[:, i])
            if connector is not None:
                connector.save_kv_layer(name, self.kv.tensors[name], None)
        for planned in self._planned:
            size = self.kv.block_tokens
            touched = planned.request.blocks[planned.start // size : -(-planned.stop // size)]
            self._note(touched, f"{planned.request_id} wrote positions {planned.start}..{planned.stop - 1}")

    def _attend(self, i: int, planned: _Planned, row: Any) -> None:
        found = self.kv.read(i, planned.request.blocks, planned.stop)
        self.setup.checked_slots += planned.stop
        same = (found == row).all(axis=1)
        if planned.poisoned:
            same[planned.start :] = True
        if not same.all():
            planned.poisoned = True
            blocks = frozenset(planned.request.blocks[: -(-planned.stop // self.kv.block_tokens)])
            for position in np.flatnonzero(~same).tolist():
                block = planned.request.blocks[position // self.kv.block_tokens]
                if all(one.block != block or one.layer != self.kv.layer_names[i] for one in self.wrong):
                    text = self._whose(i, found[position])
                    layer = self.kv.layer_names[i]
                    self.wrong.append(Wrong(planned.request_id, blocks, position, block, layer, self.rank, text))

    def _whose(self, i: int, words: Any) -> str:
        if (words == _GARBAGE).all():
            return "garbage of a block that nobody has written"
        for name, context in self.setup.contexts.items():
            match = (self._bytes.of_states(context.states)[:, i] == words).all(axis=1)
            if match.any():
                return f"position {int(np.flatnonzero(match)[0])} of {name}"
        return "bytes of no known request (torn, poisoned, or never written)"

    def _sample(self, planned: _Planned) -> list[int]:
        context = planned.request.context
        if planned.stop - planned.num_drafts < len(context):
            planned.request.drafts = []
            return []
        sampled = [next_token(context.states[-1] ^ planned.poisoned)]
        context.append(sampled[0])
        for draft in planned.drafts[: planned.num_drafts]:
            if draft != sampled[-1]:
                break
            sampled.append(next_token(context.states[-1]))
            context.append(sampled[-1])
        planned.request.drafts = draft_tokens(context.states[-1], self._num_spec) if self._num_spec else []
        return sampled
