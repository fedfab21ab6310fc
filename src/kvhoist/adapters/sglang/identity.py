"""The names of SGLang's pages: the namespace and shard of a host pool, and a page's key from SGLang's hash of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from kvhoist.adapters.sglang.engine import EngineFacts
from kvhoist.adapters.sglang.options import StorageOptions
from kvhoist.adapters.sglang.pages import HostPages
from kvhoist.control.namespace import Namespace, ParallelLayout
from kvhoist.errors import ConfigError
from kvhoist.geometry import CacheGeometry, CacheGroup, Component
from kvhoist.messages import REPLICATED, PageKey, Shard, StorageKey

_SHAPE = (
    "layout",
    "dtype",
    "start_layer",
    "end_layer",
    "layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "storage_format_tag",
)
"""What host pools say of the order of a page's bytes; each has some of it."""

_ALIKE_ON_ALL_RANKS = ("kv", "indexer", "draft_indexer")
"""Pools that hold the same bytes on every tensor-parallel rank of an MLA model. SGLang lets one rank write them."""

_HEX = re.compile(r"(?:[0-9a-f]{2}){1,64}")


class PoolNames:
    """The storage keys of one host pool's pages on this rank.

    In the namespace: the model, its weights and config, SGLang's release and choices, the pool's layout, dtype, page
    size and shape, the parallel layout and the pipeline stage. In the key: SGLang's page hash, which covers all tokens
    from the first on, LoRA and cache salt; the record's place in its page; and the rank, but for what all ranks hold
    alike. Raises ConfigError for what is not served.
    """

    def __init__(self, facts: EngineFacts, pages: HostPages, config: Any, options: StorageOptions) -> None:
        _check_served(config)
        alike = config.is_mla_model and pages.name in _ALIKE_ON_ALL_RANKS and not hasattr(pages.pool, "head_num")
        ranks = config.attn_cp_size * (1 if alike else config.tp_size)
        rank = config.attn_cp_rank if alike else config.attn_cp_rank * config.tp_size + config.tp_rank
        self.shard = REPLICATED if alike and ranks == 1 else Shard(rank, ranks)
        self.writes = config.is_storage_writer or not alike
        self.namespace = _namespace(facts, pages, config, options)
        self._num_records = len(pages.record_bytes)

    def keys(self, hashes: Sequence[str]) -> list[StorageKey]:
        """Return the keys of all records of the pages of these hashes, page by page."""
        digest, groups = self.namespace.digest, range(self._num_records)
        return [
            StorageKey(PageKey(digest, group, chain_hash), self.shard)
            for chain_hash in map(_chain_hash, hashes)
            for group in groups
        ]


def _check_served(config: Any) -> None:
    if config.dcp_size > 1:
        raise ConfigError("decode context parallelism is not served", got=f"dcp_size={config.dcp_size}")
    if config.should_split_heads:
        raise ConfigError(
            "pages that are split by heads for several tensor-parallel sizes are not served",
            got=f"tp_lcm_size={config.tp_lcm_size}",
            remedy="Leave tp_lcm_size out: each tensor-parallel size then has pages of its own.",
        )


def _namespace(facts: EngineFacts, pages: HostPages, config: Any, options: StorageOptions) -> Namespace:
    pool, slots = pages.pool, pages.page_slots
    records = tuple(Component(f"record{i}", (0,), size, slots) for i, size in enumerate(pages.record_bytes))
    shape = [f"{name}={getattr(pool, name)}" for name in _SHAPE if getattr(pool, name, None) is not None]
    return Namespace.create(
        model_id=facts.model_id,
        weights_id=facts.weights_id,
        geometry=CacheGeometry((CacheGroup(records, slots),)),
        kv_dtype=str(pool.dtype),
        config=facts.config,
        kv_scales=facts.kv_scales,
        lora=facts.lora,
        tenant=options.tenant,
        tenant_secret=options.secret(),
        block_order=" ".join([pages.name, type(pool).__name__, *shape]),
        parallel=ParallelLayout(tensor=config.tp_size, pipeline=config.pp_size, context=config.attn_cp_size),
        compute={**facts.compute, "stage": str(config.pp_rank)},
    )


def _chain_hash(page_hash: str) -> bytes:
    """Return SGLang's hash of a page (SHA-256 in hex) as bytes; of any other text a hash."""
    return bytes.fromhex(page_hash) if _HEX.fullmatch(page_hash) else sha256(page_hash.encode()).digest()
