"""One simulated rank under vLLM's real connector hooks: block tables, KV tensors, and a model made of hashes.

The hooks are called by vLLM's own code (the model runner's mixin, or the connector wrapper of its second model runner),
so their order is that of the installed release. "Attention" reads every slot of a request through its block table and
compares it with what must be there.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Mixin

from vllm_harness_kv import KvTensors, make_specs
from vllm_harness_model import Context, KvBytes, draft_tokens, next_state, next_token

_GARBAGE = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
_HISTORY = 12
# Releases before 0.32 know a rank by its place in tensor parallelism alone.
_PP_AWARE = "set_xfer_handshake_metadata_pp_aware" in vars(KVConnectorBase_V1)


@dataclass(slots=True)
class Setup:
    """What the workers of one engine share: how they are built, and what tests look at."""

    layout: str
    tp: int = 1
    pp: int = 1
    num_blocks: int = 32
    late: bool = False
    v2: bool = False
    salts: dict[str, str] = field(default_factory=dict)
    weights: str = ""
    contexts: dict[str, Context] = field(default_factory=dict)
    checked_slots: int = 0
    num_steps: int = 0
    step_log: deque[str] = field(default_factory=lambda: deque(maxlen=40))


@dataclass(frozen=True, slots=True)
class Wrong:
    """A slot that held other bytes than attention had to find there."""

    request_id: str
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


class SimWorker:
    """One rank. Methods without underscore are what vLLM's executor calls by name."""

    def __init__(self, vllm_config: Any, setup: Setup, rank: int) -> None:
        self.setup = setup
        self.rank = rank
        self.vllm_config = vllm_config if setup.tp * setup.pp == 1 else copy.deepcopy(vllm_config)
        self.vllm_config.parallel_config.rank = rank
        self._tp = SimpleNamespace(rank_in_group=rank % setup.tp, world_size=setup.tp, rank=rank, local_rank=rank)
        pp_rank = rank // setup.tp
        last = pp_rank == setup.pp - 1
        self._pp = SimpleNamespace(
            rank_in_group=pp_rank, world_size=setup.pp, rank=rank, is_first_rank=pp_rank == 0, is_last_rank=last
        )
        self.is_last_stage = last
        self.connector: Any = None
        self._runner: Any = None
        self._requests: dict[str, _Request] = {}
        self._batch: set[str] = set()
        self._planned: list[_Planned] = []
        self._kv_output: Any = None
        self._draft_ids: DraftTokenIds | None = None
        self.wrong: list[Wrong] = []
        self.block_history: dict[int, deque[str]] = {}
        config = self.vllm_config
        self._is_async = bool(config.scheduler_config.async_scheduling)
        self._v2 = setup.v2
        spec = config.speculative_config
        self._num_spec = spec.num_speculative_tokens if spec is not None else 0

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Make this rank the one that vLLM's globals speak of."""
        names = ((parallel_state, "_TP", self._tp), (parallel_state, "_PP", self._pp))
        before = [getattr(module, name) for module, name, _ in names]
        agent = kv_transfer_state._KV_CONNECTOR_AGENT
        for module, name, value in names:
            setattr(module, name, value)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            yield
        finally:
            for (module, name, _), value in zip(names, before, strict=True):
                setattr(module, name, value)
            kv_transfer_state._KV_CONNECTOR_AGENT = agent

    # -- start and end ---------------------------------------------------------------------------------------------

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return make_specs(self.vllm_config, self.setup.layout, self.setup.tp, self._tp, self._pp)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return [self.setup.layout if self.setup.layout != "MLA" else "LBNHC"]

    def set_kv_cache_layout(self, name: str) -> None:
        self.vllm_config.cache_config.kv_cache_layout = name

    def determine_available_memory(self) -> int:
        return 1 << 30

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        kv_cache_config = kv_cache_configs[self.rank]
        self.vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        for name in ("hash_block_size", "cache_hit_alignment_tokens"):
            if name in vars(kv_cache_config):
                setattr(self.vllm_config.cache_config, name, getattr(kv_cache_config, name))
        self.kv = KvTensors(self.vllm_config, kv_cache_config, self.setup.layout)
        seen_rank = 0 if self.setup.layout == "MLA" else self.rank % self.setup.tp
        self._bytes = KvBytes(self.kv.layer_indices, self.kv.words_per_token, seen_rank)
        if self.vllm_config.kv_transfer_config is None:
            return
        self.connector = KVConnectorFactory.create_connector(
            config=self.vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache_config
        )
        if self._v2:
            from vllm.v1.worker.gpu.kv_connector import get_kv_connector

            kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
            self._runner = get_kv_connector(self.vllm_config, self.kv.tensors)
            return
        self.connector.register_kv_caches(self.kv.tensors)
        self.connector.set_host_xfer_buffer_ops(copy_kv_blocks)

    def compile_or_warm_up_model(self) -> SimpleNamespace:
        return SimpleNamespace(language_model=0.0, encoder=0.0)

    def get_kv_connector_handshake_metadata(self) -> dict[Any, Any] | None:
        metadata = self.connector.get_handshake_metadata() if self.connector is not None else None
        if metadata is None:
            return None
        place = (self._pp.rank_in_group, self._tp.rank_in_group)
        return {place if _PP_AWARE else place[1]: metadata}

    def shutdown(self) -> None:
        if self.connector is not None:
            self.connector.shutdown()
            self.connector = None

    # -- a step ----------------------------------------------------------------------------------------------------

    def execute_model(self, output: Any) -> ModelRunnerOutput | None:
        """Run a step up to sampling; its output where nothing is to be sampled."""
        if self.connector is None:
            self._update(output)
            self._forward(output)
            return EMPTY_MODEL_RUNNER_OUTPUT if not output.total_num_scheduled_tokens else None
        if self._v2:
            return self._execute_v2(output)
        self.connector.handle_preemptions(output.kv_connector_metadata)
        self._update(output)
        if not output.total_num_scheduled_tokens:
            return Mixin.kv_connector_no_forward(output, self.vllm_config)
        with (
            set_forward_context(None, self.vllm_config, num_tokens=output.total_num_scheduled_tokens),
            Mixin.maybe_get_kv_connector_output(output, defer_finalize=self._num_spec > 0) as self._kv_output,
        ):
            self._forward(output)
        return None

    def _execute_v2(self, output: Any) -> ModelRunnerOutput | None:
        if not output.total_num_scheduled_tokens:
            self._update(output)
            return self._runner.no_forward(output)
        self._update(output)
        with set_forward_context(None, self.vllm_config, num_tokens=output.total_num_scheduled_tokens):
            self._runner.pre_forward(output)
            self._forward(output)
            self._runner.finish_forward()
        self._kv_output = self._runner.post_forward(output.finished_req_ids)
        return None

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        sampled = [self._sample(planned) for planned in self._planned]
        ids = [planned.request_id for planned in self._planned]
        if self._num_spec:
            Mixin.finalize_kv_connector()
            drafts = [planned.request.drafts for planned in self._planned]
            self._draft_ids = DraftTokenIds(ids, [list(one) for one in drafts])
        kv_output, self._kv_output = self._kv_output, None
        if not self.is_last_stage:
            return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=kv_output)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=kv_output,
        )

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        drafts, self._draft_ids = self._draft_ids, None
        return drafts

    # -- inside ----------------------------------------------------------------------------------------------------

    def _update(self, output: Any) -> None:
        """Follow the scheduler's output as the real runner's `_update_states` does, and plan the forward."""
        for name in output.finished_req_ids:
            self._requests.pop(name, None)
            self._batch.discard(name)
        computed: dict[str, int] = {}
        fresh: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids if self._v2 and new.prefill_token_ids else new.prompt_token_ids)
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
        self._planned = [self._plan(name, count, computed[name], output) for name, count in self._order(output)]
        self._scribble(computed, fresh)

    def _order(self, output: Any) -> list[tuple[str, int]]:
        return list(output.num_scheduled_tokens.items())

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

    def _scribble(self, computed: dict[str, int], fresh: dict[str, int]) -> None:
        """Fill the blocks that this step begins to write with garbage: whoever still reads them copies that."""
        size = self.kv.block_tokens
        for planned in self._planned:
            first = max(-(-planned.start // size), fresh[planned.request_id])
            blocks = planned.request.blocks[first:]
            if blocks:
                self.kv.fill(blocks, _GARBAGE)
                self._note(blocks, f"given to {planned.request_id} from index {first}")

    def _note(self, blocks: list[int], text: str) -> None:
        for block in blocks:
            history = self.block_history.setdefault(block, deque(maxlen=_HISTORY))
            history.append(f"step {self.setup.num_steps}: {text}")

    def _forward(self, output: Any) -> None:
        rows = [self._bytes.of_states(planned.states) for planned in self._planned]
        for i, name in enumerate(self.kv.layer_names):
            for planned, row in zip(self._planned, rows, strict=True):
                written = row[planned.start :, i]
                blocks = planned.request.blocks
                self.kv.write(i, blocks, planned.start, ~written if planned.poisoned else written)
            if self.connector is not None:
                self.connector.wait_for_layer_load(name)
            for planned, row in zip(self._planned, rows, strict=True):
                self._attend(i, planned, row[:, i])
            if self.connector is not None:
                self.connector.save_kv_layer(name, self.kv.tensors[name], None)
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
            for position in np.flatnonzero(~same).tolist():
                block = planned.request.blocks[position // self.kv.block_tokens]
                if all(one.block != block or one.layer != self.kv.layer_names[i] for one in self.wrong):
                    text = self._whose(i, found[position])
                    layer = self.kv.layer_names[i]
                    self.wrong.append(Wrong(planned.request_id, position, block, layer, self.rank, text))

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
