"""All that differs between the vLLM releases that the connector runs on (read in 0.20 and 0.32), found by looking.

| what | 0.20 | 0.32 |
| --- | --- | --- |
| seed of block hashes | random unless PYTHONHASHSEED is set | fixed for cryptographic hashes |
| LoRA in block hashes | name | name and path |
| KV layout | `get_kv_cache_block_dim` of the backend | blocks first |
| tokens of one block hash | `cache_config.hash_block_size`, or the block's | `kv_cache_config.hash_block_size` |
| replicas of KV among tensor-parallel ranks | to be derived from the KV heads | `kv_cache_config.kv_tp_replicas` |
| speculation spoils the last block of a hit | `use_eagle()` | `use_eagle_block_drop()` |
| ranks known at the handshake | those of the last pipeline stage | all |
| scheduler's stats | taken only with a worker's | taken |
| new blocks are zeroed | for Mamba | for Mamba and KV of several precisions; by the second runner, before the hooks |
| sources of hits | none | `CacheHitSource` |
| blocks for requests that load | none are kept: `room.py` | reserved |
| steps without requests | none | where `has_pending_push_work` says so |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType, core

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32
    CacheHitSource = None

from kvhoist.control.tiers import Tier
from kvhoist.settings import Settings

KNOWS_ALL_RANKS = "set_xfer_handshake_metadata_pp_aware" in vars(base.KVConnectorBase_V1)
"""Whether the handshake brings the reports of all pipeline stages."""

NEEDS_WORKER_STATS = "get_transfer_results" not in vars(base.KVConnectorBase_V1)
"""Whether the scheduler's stats are lost in steps in which no worker reports any."""

KEEPS_ROOM_FOR_LOADS = "_inflight_prefill_reserved_blocks" in vars(Scheduler)
"""Whether vLLM lets a request load only where the blocks suffice for all that are loading."""


def block_hashes_last(vllm_config: Any) -> bool:
    """Tell whether another process, or this one after a restart, would give the same tokens the same block hash."""
    if Settings.from_env().has_python_hash_seed:
        return True
    has_fixed_seed = "DEFAULT_NONE_HASH_SEED" in vars(kv_cache_utils)
    return has_fixed_seed and str(vllm_config.cache_config.prefix_caching_hash_algo).startswith("sha256")


def hashes_lora_content() -> bool:
    """Tell whether a block hash covers which adapter a LoRA name stands for, and not the name alone."""
    adapter = SimpleNamespace(lora_name="name", lora_path="path", lora_int_id=1)
    return "path" in str(kv_cache_utils._gen_lora_extra_hash_keys(SimpleNamespace(lora_request=adapter)))


def hash_tokens(vllm_config: Any, kv_cache_config: Any, block_tokens: int) -> int:
    """Return the tokens of one block hash."""
    candidates = (kv_cache_config, vllm_config.cache_config)
    named = (getattr(config, "hash_block_size", None) for config in candidates)
    return next((tokens for tokens in named if tokens is not None), block_tokens)


def held_back_blocks(vllm_config: Any) -> int:
    """Return how many blocks at the end of a hit are left to compute: a drafter's last one is not bound by its hash."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return 0
    drops = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    return int(drops())


def kv_heads(model_config: Any) -> list[int | None]:
    """Return the KV heads of a model over all ranks, one entry where all layers have as many; None for MLA's latent."""
    if model_config.use_mla:
        return [None]
    arch = model_config.model_arch_config
    overrides = getattr(arch, "per_layer_overrides", None)
    if not overrides:
        return [model_config.get_total_num_kv_heads()]
    return [arch[i].total_num_kv_heads for i in range(len(overrides))]


def kv_replicas(kv_cache_config: Any) -> int | None:
    """Return how many consecutive tensor-parallel ranks hold the same KV, where vLLM says so."""
    return getattr(kv_cache_config, "kv_tp_replicas", None)


def has_dynamic_scales(vllm_config: Any) -> bool:
    """Tell whether K and V scales are computed from the first tokens seen, and so differ from start to start."""
    return bool(getattr(vllm_config.cache_config, "calculate_kv_scales", False))


def zeroes_before_hooks(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Tell whether the model runner zeroes blocks that a step gives away before any hook of the step: an offload that
    still reads one of them cannot be waited for."""
    second_runner = getattr(vllm_config, "use_v2_model_runner", False)
    return bool(second_runner and getattr(kv_cache_config, "needs_kv_cache_zeroing", False))


def attention_layer(vllm_config: Any, layer_name: str) -> Any:
    return vllm_config.compilation_config.static_forward_context[layer_name]


def backend_name(vllm_config: Any, layer_name: str, spec: Any) -> str:
    """Return the name of the attention backend that owns a layer's cache, and of the variant that orders its blocks
    where shape and strides do not show it: the CPU's instruction set, ROCm's shuffled layouts."""
    layer = attention_layer(vllm_config, layer_name)
    name = str(layer.get_attn_backend().get_name())
    if name == "CPU_ATTN":
        isa = getattr(layer, "isa", None)
        if isa is None:
            from vllm.v1.attention.backends import cpu_attn

            isa = cpu_attn._get_attn_isa(spec.dtype, spec.block_size, spec.head_size)
        return f"{name} {isa}"
    if envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT or getattr(layer, "uses_shuffled_layout", False):
        return f"{name} shuffled"
    return name


def block_dim(vllm_config: Any, layer_name: str, spec: Any) -> int:
    """Return which dimension of a layer's registered cache counts blocks."""
    backend = attention_layer(vllm_config, layer_name).get_attn_backend()
    ask = getattr(backend, "get_kv_cache_block_dim", None)
    if ask is None:
        return 0
    dtype = vllm_config.cache_config.cache_dtype
    return int(ask(spec.block_size, spec.num_kv_heads, spec.head_size, cache_dtype_str=dtype))


def hit_sources(tokens: Mapping[Tier, int]) -> Any:
    """Return the tokens of a hit by vLLM's names of tiers."""
    names = {Tier.HOST: CacheHitSource.HOST, Tier.STORAGE: CacheHitSource.DISK}
    return {names[tier]: number for tier, number in tokens.items()}


def engine_waker() -> Callable[[], object] | None:
    """Return what lets the engine's loop look for work, from any thread; None where no loop of its own sleeps (an
    engine in the caller's process steps when it is called). To be called while the engine is built: its loop's queue
    is found on the stack, for a connector is told of neither."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        queue = getattr(frame.f_locals.get("self"), "input_queue", None)
        if frame.f_globals.get("__name__") == core.__name__ and queue is not None:
            return partial(queue.put_nowait, (EngineCoreRequestType.WAKEUP, None))
    return None


def current_stream_handle() -> int:
    """Return the runtime's handle of the stream that the engine computes on."""
    return int(torch.cuda.current_stream().cuda_stream)
