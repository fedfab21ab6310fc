"""vLLM's configuration of a simulated engine."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from vllm.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm_harness_batch import Setup
from vllm_harness_model import MAX_MODEL_LEN


def engine_config(
    model: Path,
    setup: Setup,
    *,
    blocks: int,
    block_tokens: int,
    async_scheduling: bool,
    num_spec: int,
    max_batched: int,
    max_seqs: int,
    prefix_caching: bool,
    policy: str,
) -> VllmConfig:
    """Return a config of its own. vLLM's CPU platform refuses some of what is set here after its checks (asynchronous
    scheduling, several ranks in a process): the scheduler and the connector know no platform."""
    config = copy.deepcopy(_base_config(model, num_spec))
    cache, scheduling, parallel = config.cache_config, config.scheduler_config, config.parallel_config
    cache.block_size, cache.num_gpu_blocks_override = block_tokens, blocks
    cache.enable_prefix_caching = prefix_caching
    longest = min(MAX_MODEL_LEN, (blocks - 1) * block_tokens)  # one block is vLLM's null block
    config.model_config.max_model_len = scheduling.max_model_len = longest
    scheduling.max_num_batched_tokens, scheduling.max_num_seqs = max_batched, max_seqs
    scheduling.async_scheduling, scheduling.policy = async_scheduling, policy
    scheduling.disable_hybrid_kv_cache_manager = False
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size = setup.tp, setup.pp
    parallel.world_size = setup.tp * setup.pp
    if setup.v2:
        config.__class__ = _with_property(VllmConfig, "use_v2_model_runner")
    if setup.layout == "MLA":
        config.model_config.__class__ = _with_property(ModelConfig, "use_mla")
    return config


@functools.lru_cache(maxsize=8)
def _base_config(model: Path, num_spec: int) -> VllmConfig:
    """A config is slow to build and quick to copy."""
    model_config = ModelConfig(
        model=str(model),
        tokenizer=str(model),
        skip_tokenizer_init=True,
        dtype="float16",
        seed=0,
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
    )
    parallel = ParallelConfig(distributed_executor_backend="mp")
    speculative = None
    if num_spec:
        speculative = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=num_spec,
            prompt_lookup_max=3,
            prompt_lookup_min=1,
            target_model_config=model_config,
            target_parallel_config=parallel,
        )
    return VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=4, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=64,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        parallel_config=parallel,
        speculative_config=speculative,
    )


def _with_property(kind: type[Any], name: str) -> type[Any]:
    """Derive a class whose property `name` is true: what the simulated model or runner is, and the checkpoint not."""
    return type(kind.__name__, (kind,), {name: property(lambda self: True)})
