"""SGLang's own host pools, small and on the CPU, a checkpoint, and backends made by SGLang's own factory."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

PAGE = 4
LAYERS, HEADS, DIM, LATENT, ROPE = 5, 2, 8, 12, 4
OPTIONS = {
    "backend_name": "kvhoist",
    "module_path": "kvhoist.adapters.sglang",
    "class_name": "KvhoistStorage",
    "interface_v1": 1,
}


def mha_pool(
    layout: str = "page_first", *, pages: int = 16, layers: int = LAYERS, heads: int = HEADS, v_dim: int = DIM
) -> Any:
    """A host pool of K and V for `pages` pages of PAGE slots, with random bytes in it."""
    k, v = (tuple(torch.zeros(PAGE, heads, d, dtype=torch.bfloat16) for _ in range(layers)) for d in (DIM, v_dim))
    k_at, v_at = (torch.tensor([row.data_ptr() for row in rows], dtype=torch.uint64) for rows in (k, v))
    info = MHABufferInfo(
        buffers=KVBuffers(k=k, v=v, k_data_ptrs=k_at, v_data_ptrs=v_at, layout=KVBufferLayout.NHD),
        page_size=PAGE,
        head_num=heads,
        head_dim=DIM,
        v_head_dim=v_dim,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return filled(get_mha_host_pool_cls(info)(info, **_sizes(layout, pages, layers)))


def mla_pool(layout: str = "page_first", *, pages: int = 16) -> Any:
    """A host pool of latent rows, likewise."""
    rows = tuple(torch.zeros(PAGE, 1, LATENT + ROPE, dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=torch.tensor([row.data_ptr() for row in rows], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        kv_cache_dim=LATENT + ROPE,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return filled(MLATokenToKVPoolHost(info, **_sizes(layout, pages, LAYERS), target_layer_num=LAYERS))


def _sizes(layout: str, pages: int, layers: int) -> dict[str, Any]:
    return {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": PAGE,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": PAGE,
        "start_layer": 0,
        "end_layer": layers,
        "host_token_capacity": pages * PAGE,
    }


def filled(pool: Any) -> Any:
    """Fill a pool with random bytes."""
    whole = pool.kv_buffer
    for buffer in [whole] if isinstance(whole, torch.Tensor) else whole:
        as_bytes = buffer.view(torch.uint8)
        as_bytes.copy_(torch.randint(0, 256, as_bytes.shape, dtype=torch.uint8))
    return pool


def slots(pages: Sequence[int]) -> torch.Tensor:
    """The host indices of these pages, as SGLang gives them: one a slot."""
    return torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)], dtype=torch.int64)


def page_bytes(pool: Any, pages: Sequence[int]) -> list[bytes]:
    """What the pool holds in these pages, read by its own method."""
    flat = (pool.get_data_page(page * PAGE, flat=True) for page in pages)
    return [page.contiguous().view(torch.uint8).numpy().tobytes() for page in flat]


def names(count: int, prefix: str = "page") -> list[str]:
    """Page hashes like SGLang's: SHA-256 in hex."""
    return [sha256(f"{prefix} {i}".encode()).hexdigest() for i in range(count)]


def storage_config(options: dict[str, Any], **config: Any) -> Any:
    """SGLang's own description of a rank, one of one unless `config` says otherwise."""
    plain = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "tiny",
    }
    return HiCacheStorageConfig(**{**plain, **config}, extra_config={**OPTIONS, **options})


def create_backend(pool: Any, options: dict[str, Any], **config: Any) -> Any:
    """What SGLang does with `--hicache-storage-backend dynamic`: its factory makes the backend, which gets the pool."""
    made = StorageBackendFactory.create_backend("dynamic", storage_config(options, **config), pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def write_checkpoint(folder: Path, weights: bytes = bytes(range(64)), **config: Any) -> Path:
    """A model's folder with one small tensor."""
    folder.mkdir(exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weights)
    text = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, **config}
    (folder / "config.json").write_text(json.dumps(text))
    return folder
