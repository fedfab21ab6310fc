"""One simulated rank under vLLM's real connector hooks: block tables, KV tensors, and a model made of hashes.

The hooks are called by vLLM's own code (the model runner's mixin, or the connector wrapper of its second model runner),
so their order is that of the installed release. "Attention" reads every slot of a request through its block table and
compares it with what must be there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Mixin
from vllm_harness_batch import Setup, SimBatch
from vllm_harness_kv import KvTensors, make_specs
from vllm_harness_model import KvBytes

# Releases before 0.32 know a rank by its place in tensor parallelism alone.
_PP_AWARE = "set_xfer_handshake_metadata_pp_aware" in vars(KVConnectorBase_V1)


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
        self._kv_output: Any = None
        self._draft_ids: DraftTokenIds | None = None
        config = self.vllm_config
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
        kv_bytes = KvBytes(self.kv.layer_indices, self.kv.words_per_token, seen_rank)
        is_async = bool(self.vllm_config.scheduler_config.async_scheduling)
        self.batch = SimBatch(self.setup, self.kv, kv_bytes, self.rank, is_async=is_async, num_spec=self._num_spec)
        if self.vllm_config.kv_transfer_config is None:
            return
        self.connector = KVConnectorFactory.create_connector(
            config=self.vllm_config, role=KVConnectorRole.WORKER, kv_cache_config=kv_cache_config
        )
        if self.setup.v2:
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
            self.batch.update(output)
            self.batch.scribble()
            self.batch.forward(self.connector)
            return EMPTY_MODEL_RUNNER_OUTPUT if not output.total_num_scheduled_tokens else None
        if self.setup.v2:
            return self._execute_v2(output)
        self.connector.handle_preemptions(output.kv_connector_metadata)
        self.batch.update(output)
        self.batch.scribble()
        if not output.total_num_scheduled_tokens:
            return Mixin.kv_connector_no_forward(output, self.vllm_config)
        with (
            set_forward_context(None, self.vllm_config, num_tokens=output.total_num_scheduled_tokens),
            Mixin.maybe_get_kv_connector_output(output, defer_finalize=self._num_spec > 0) as self._kv_output,
        ):
            self.batch.forward(self.connector)
        return None

    def _execute_v2(self, output: Any) -> ModelRunnerOutput | None:
        if not output.total_num_scheduled_tokens:
            self.batch.update(output)
            return self._runner.no_forward(output)
        self.batch.update(output)
        with set_forward_context(None, self.vllm_config, num_tokens=output.total_num_scheduled_tokens):
            self._runner.pre_forward(output)
            self.batch.scribble()  # this runner's hook comes after it has updated its states
            self.batch.forward(self.connector)
            self._runner.finish_forward()
        self._kv_output = self._runner.post_forward(output.finished_req_ids)
        return None

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        ids, sampled, drafts = self.batch.sample()
        if self._num_spec:
            Mixin.finalize_kv_connector()
            self._draft_ids = DraftTokenIds(ids, drafts)
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
