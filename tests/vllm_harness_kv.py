"""The KV tensors of a simulated rank, as vLLM would register them, and the attention layers that vLLM is told of."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import AttentionBackend
from vllm_harness_model import HEAD_DIM, NUM_HEADS, Words

try:
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache
except ImportError:  # before 0.32 each backend has a shape of its own
    KVCacheLayout = None

HAS_LAYOUTS = KVCacheLayout is not None
LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "MLA") if HAS_LAYOUTS else ("planes", "pairs", "MLA")
LATENT_DIM = 32
DTYPE = torch.float16


class SimBackend(AttentionBackend):
    """Says how its cache lies, as the code of the release asks; computes nothing."""

    @staticmethod
    def get_name() -> str:
        return "SIM"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [1, 2, 4, 8, 16]

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        return tuple(KVCacheLayout) if HAS_LAYOUTS else None


class PlanesBackend(SimBackend):
    """K and V in two planes, as 0.20's CPU and FlashAttention backends keep them."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return 2, num_blocks, num_kv_heads, block_size, head_size


class PairsBackend(SimBackend):
    """K and V side by side in each block, as 0.20's FlashInfer and Triton backends keep them."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, 2, block_size, num_kv_heads, head_size


class LatentBackend(SimBackend):
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, block_size, head_size


_BACKENDS = {"planes": PlanesBackend, "pairs": PairsBackend, "MLA": LatentBackend}
# Axes of each registered shape that are block and row; all others belong to a row.
_BLOCK_AND_ROW = {"planes": (1, 3), "pairs": (0, 2), "MLA": (0, 1)}


class SimLayer(AttentionLayerBase):
    """An attention layer of the simulated model, for code that asks a layer for its backend."""

    def __init__(self, backend: type[AttentionBackend], spec: Any) -> None:
        self._backend = backend
        self._spec = spec
        self.num_kv_heads = spec.num_kv_heads
        self.head_size = spec.head_size
        self.kv_cache_dtype = "auto"

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self._spec


def make_specs(vllm_config: Any, layout: str, tp: int, tp_group: Any, pp_group: Any) -> dict[str, Any]:
    """Return this rank's layers and their cache specs, and register the layers with the config, as model code does."""
    num_layers = vllm_config.model_config.hf_config.num_hidden_layers
    per_stage = -(-num_layers // pp_group.world_size)
    first = per_stage * pp_group.rank_in_group
    block_tokens = vllm_config.cache_config.block_size
    if layout == "MLA":
        known = kv_cache_interface.MLAAttentionSpec.__dataclass_fields__
        replicated = {"max_tp_shards": 1} if "max_tp_shards" in known else {}
        spec = kv_cache_interface.MLAAttentionSpec(
            block_size=block_tokens, num_kv_heads=1, head_size=LATENT_DIM, dtype=DTYPE, **replicated
        )
    else:
        heads = max(1, NUM_HEADS // tp)
        spec = kv_cache_interface.FullAttentionSpec(
            block_size=block_tokens, num_kv_heads=heads, head_size=HEAD_DIM, dtype=DTYPE
        )
    names = [f"model.layers.{i}.self_attn.attn" for i in range(first, min(first + per_stage, num_layers))]
    backend = _BACKENDS.get(layout, SimBackend)
    layers = vllm_config.compilation_config.static_forward_context
    layers.clear()
    layers.update({name: SimLayer(backend, spec) for name in names})
    return dict.fromkeys(names, spec)


class KvTensors:
    """One rank's caches. Reads and writes go by layer number, block table and position; 64-bit words a row."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, layout: str) -> None:
        group = kv_cache_config.kv_cache_groups[0]
        self.layer_names: list[str] = list(group.layer_names)
        self.layer_indices = [int(name.split(".")[2]) for name in self.layer_names]
        self.block_tokens: int = group.kv_cache_spec.block_size
        self.tensors: dict[str, torch.Tensor] = self._allocate(vllm_config, kv_cache_config, layout)
        axes = _BLOCK_AND_ROW.get(layout, (0, 2))
        if HAS_LAYOUTS:
            axes = (0, 2)
        self._views = [np.moveaxis(self._words(self.tensors[name]), axes, (0, 1)) for name in self.layer_names]
        self._inner = self._views[0].shape[2:]
        self.words_per_token = int(np.prod(self._inner))

    def read(self, layer: int, blocks: list[int], num_tokens: int) -> Words:
        """Gather the first `num_tokens` rows: [tokens, words]."""
        needed = -(-num_tokens // self.block_tokens)
        rows = self._views[layer][blocks[:needed]]
        return rows.reshape(needed * self.block_tokens, self.words_per_token)[:num_tokens]

    def write(self, layer: int, blocks: list[int], start: int, rows: Words) -> None:
        positions = np.arange(start, start + len(rows))
        table = np.array(blocks)[positions // self.block_tokens]
        self._views[layer][table, positions % self.block_tokens] = rows.reshape(len(rows), *self._inner)

    def fill(self, blocks: list[int], word: Any) -> None:
        for view in self._views:
            view[blocks] = word

    def _allocate(self, vllm_config: Any, kv_cache_config: Any, layout: str) -> dict[str, torch.Tensor]:
        group = kv_cache_config.kv_cache_groups[0]
        if HAS_LAYOUTS:
            resolved = vllm_config.cache_config.get_resolved_kv_cache_layout()
            return dict(allocate_kv_cache(kv_cache_config, torch.device("cpu"), resolved, [self.block_tokens]))
        spec = group.kv_cache_spec
        shape = _BACKENDS[layout].get_kv_cache_shape(
            kv_cache_config.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size
        )
        return {name: torch.zeros(shape, dtype=spec.dtype) for name in self.layer_names}

    @staticmethod
    def _words(tensor: torch.Tensor) -> Words:
        words: Words = tensor.view(torch.int64).numpy().view(np.uint64)
        return words
