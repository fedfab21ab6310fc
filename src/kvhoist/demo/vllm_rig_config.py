"""The configuration of the engine that `vllm_rig` steps: of a model that is never loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvhoist.demo.vllm_server import kvhoist_connector

LONGEST = 1 << 17
"""Tokens of the longest request, and of the largest step."""

VOCABULARY = 32000


@dataclass(frozen=True, slots=True)
class RigOptions:
    """One engine's scheduler. `answer_steps` is how many steps after its order a job is done; `host_pages` what each of
    `num_ranks` ranks can hold. `connector` False leaves kvhoist out."""

    block_tokens: int = 16
    device_blocks: int = 1 << 16
    host_pages: int = 1 << 13
    max_running: int = 1024
    storage: bool = False
    num_ranks: int = 1
    answer_steps: int = 1
    connector: bool = True


def settings_of(options: RigOptions) -> dict[str, Any]:
    """Return the connector's settings. No store is opened: that is the workers' business."""
    storage = {"storage": "file:/nowhere"} if options.storage else {}
    return {"host_bytes": "1GiB", "weights_id": "none", **storage}


def cache_config_of(options: RigOptions) -> KVCacheConfig:
    """Return one group of one full-attention layer; tensors there are none."""
    spec = FullAttentionSpec(block_size=options.block_tokens, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    group = KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)
    return KVCacheConfig(num_blocks=options.device_blocks, kv_cache_tensors=[], kv_cache_groups=[group])


def vllm_config_of(folder: Path, options: RigOptions) -> VllmConfig:
    """Write the config of a small model into `folder`, and return vLLM's for an engine that would serve it."""
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LONGEST,
    }
    (folder / "config.json").write_text(json.dumps(model))
    cache = CacheConfig(block_size=options.block_tokens, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True
        ),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=options.max_running,
            max_num_batched_tokens=LONGEST,
            max_model_len=LONGEST,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        parallel_config=ParallelConfig(),
        kv_transfer_config=KVTransferConfig(**kvhoist_connector(**settings_of(options))) if options.connector else None,
    )
    config.cache_config.block_size = options.block_tokens
    config.cache_config.num_gpu_blocks = options.device_blocks
    return config
