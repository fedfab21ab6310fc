"""Which part of the KV a rank of an engine holds, which of its replicas writes it, and how much host memory it gets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvhoist.checks import count
from kvhoist.errors import CapacityError, GeometryError, UnsupportedGeometryError
from kvhoist.messages import REPLICATED, Shard
from kvhoist.units import format_bytes


@dataclass(frozen=True, slots=True)
class Place:
    """What one rank is to the cache. `rank` of `num_ranks` is its number in completions; `shard` names its part of a
    page in storage, the same on all ranks that hold the same bytes; of those, one `persists`."""

    rank: int
    num_ranks: int
    shard: Shard
    persists: bool


def place_of(
    *,
    tp_size: int,
    tp_rank: int,
    pp_size: int = 1,
    pp_rank: int = 0,
    kv_heads: Iterable[int | None],
    kv_tp_replicas: int | None = None,
    dcp_size: int = 1,
    pcp_size: int = 1,
) -> Place:
    """Return the place of the rank `(pp_rank, tp_rank)` of one engine.

    `kv_heads` and `kv_tp_replicas` are those of `tp_replicas`. Ranks that hold the same bytes are neighbours in tensor
    parallelism, the first of them persists. Raises UnsupportedGeometryError for context parallelism, whose ranks hold
    other tokens of a block; GeometryError as `tp_replicas` does; ConfigError for ranks outside of their sizes.
    """
    for name, size in (("decode", dcp_size), ("prefill", pcp_size)):
        if count(f"{name} context parallel size", size, least=1) > 1:
            raise UnsupportedGeometryError(
                f"{name} context parallelism is not served yet: each rank holds other tokens of a block",
                got=f"{name}_context_parallel_size={size}",
                expected="1",
                remedy="Turn context parallelism off, or run without kvhoist.",
            )
    replicas = tp_replicas(tp_size, kv_heads, kv_tp_replicas)
    count("pipeline parallel size", pp_size, least=1)
    count("tensor parallel rank", tp_rank, most=tp_size - 1)
    count("pipeline parallel rank", pp_rank, most=pp_size - 1)
    shards_a_stage = tp_size // replicas
    num_ranks = tp_size * pp_size
    shard = Shard(pp_rank * shards_a_stage + tp_rank // replicas, pp_size * shards_a_stage)
    if shard.num_ranks == 1 < num_ranks:
        shard = REPLICATED
    return Place(pp_rank * tp_size + tp_rank, num_ranks, shard, tp_rank % replicas == 0)


def tp_replicas(tp_size: int, kv_heads: Iterable[int | None], kv_tp_replicas: int | None = None) -> int:
    """Return how many neighbouring tensor parallel ranks hold the same bytes in every layer of the cache group.

    `kv_heads` are the model's KV heads over all ranks, None for MLA's latent (every rank holds all of it): one entry a
    model, or a layer, whose caches are in the group; the draft model's too, since its heads may be cut where the
    target's are not. vLLM gives neighbours the same head where there are fewer heads than ranks. `kv_tp_replicas` is
    what vLLM 0.32 says in KVCacheConfig, None in releases that do not; its 1 means "not known" except for MLA, where it
    tells of a layer that is cut.

    Raises GeometryError for heads that do not divide over the ranks, or replicas that do not.
    """
    count("tensor parallel size", tp_size, least=1)
    latent = tp_size if kv_tp_replicas is None else count("kv_tp_replicas", kv_tp_replicas, least=1)
    found = [latent if heads is None else _head_replicas(tp_size, heads) for heads in kv_heads]
    if not found or tp_size % latent:
        raise GeometryError(
            "it is not known which tensor parallel ranks hold the same KV",
            got=f"KV heads of {len(found)} models, kv_tp_replicas={kv_tp_replicas}, {tp_size} ranks",
            expected="the KV heads of at least one model, and replicas that divide the ranks",
        )
    return math.gcd(*found)


def _head_replicas(tp_size: int, heads: int) -> int:
    count("KV heads", heads, least=1)
    if max(heads, tp_size) % min(heads, tp_size):
        raise GeometryError(
            "the KV heads do not divide over the tensor parallel ranks",
            got=f"{heads} heads, {tp_size} ranks",
            expected="one a multiple of the other",
        )
    return max(1, tp_size // heads)


def ranks_on_node(*, world_size: int, nodes_per_engine: int, engines_on_node: int) -> int:
    """Return how many ranks, of all engines, share this node's host memory.

    | argument | vllm_config.parallel_config, 0.20 and 0.32 |
    | --- | --- |
    | `world_size` | `world_size` (tp x pp x prefill context parallel; with `external_launcher` also x data parallel) |
    | `nodes_per_engine` | `nnodes_within_dp` (1 unless `nnodes` > 1; Ray spreads ranks without setting it) |
    | `engines_on_node` | `data_parallel_size_local`, at least 1; 1 with `external_launcher` |

    `data_parallel_size_local` counts this node's engines only for MoE models behind vLLM's own load balancer. In the
    engine processes of a dense model both releases set it to 1, and `data_parallel_size` too; then
    `data_parallel_rank_local` is no longer None and tells that there are siblings, but not how many. With
    `data_parallel_external_lb` each engine is a server of its own and sees itself only. In both cases the user has to
    divide: `host_bytes` is then what one engine gets.

    Raises GeometryError for ranks that do not divide over the nodes.
    """
    count("world_size", world_size, least=1)
    count("engines_on_node", engines_on_node, least=1)
    if world_size % count("nodes_per_engine", nodes_per_engine, least=1):
        raise GeometryError(
            "an engine's ranks do not divide over its nodes",
            got=f"{world_size} ranks, {nodes_per_engine} nodes",
            expected="the same number of ranks on every node",
        )
    return world_size // nodes_per_engine * engines_on_node


def host_bytes_of_rank(total_bytes: int, ranks_on_node: int) -> int:
    """Return one rank's part of the host memory that a node gives to the cache, rounded down.

    Raises CapacityError where that is nothing.
    """
    count("host_bytes", total_bytes, least=1)
    part = total_bytes // count("ranks_on_node", ranks_on_node, least=1)
    if not part:
        raise CapacityError(
            "the host memory does not reach for all ranks",
            got=f"{format_bytes(total_bytes)} for {ranks_on_node} ranks",
            expected="at least one page a rank",
            remedy="Raise host_bytes.",
        )
    return part
