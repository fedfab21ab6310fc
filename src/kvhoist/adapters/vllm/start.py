"""From vLLM's configuration to the two sides: what is served, with what shape, and what cannot be."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from kvhoist import __version__
from kvhoist.adapters.vllm import compat
from kvhoist.adapters.vllm.caches import read_kv_caches
from kvhoist.adapters.vllm.identity import engine_namespace, group_of
from kvhoist.adapters.vllm.metadata import WorkerReport
from kvhoist.adapters.vllm.options import ConnectorOptions
from kvhoist.adapters.vllm.prefixes import Waits
from kvhoist.adapters.vllm.ranks import Place, host_bytes_of_rank, place_of, ranks_on_node
from kvhoist.adapters.vllm.requests import PageShape
from kvhoist.adapters.vllm.room import Room
from kvhoist.adapters.vllm.scheduler import SchedulerSide
from kvhoist.adapters.vllm.worker import WorkerSide
from kvhoist.control.directory import Directory
from kvhoist.control.plane import ControlPlane
from kvhoist.control.tiers import Tier
from kvhoist.errors import ConfigError, UnsupportedGeometryError

_SERVED_SPECS = (FullAttentionSpec, MLAAttentionSpec)

_TWO_ATTENTIONS = ("longcat_flash",)
"""Model types with two attention modules a layer, whose names have two numbers."""

_COMPARED = {
    "num_ranks": "all",
    "page_tokens": "all",
    "blocks_per_page": "all",
    "options": "all",
    "components": "stage",
    "block_order": "stage",
}
"""What ranks must report alike, over all of them or within a pipeline stage."""

_log = logging.getLogger("vllm.kvhoist")


def served_group(kv_cache_config: Any) -> tuple[int, Any]:
    """Return the index and spec of the KV cache group that is served: the only one, of full attention in all layers.

    Raises UnsupportedGeometryError. A model with several groups is not served even where one of them is full attention:
    vLLM takes tokens that a connector brings as computed in all groups, and no other group's blocks are at hand.
    """
    groups = kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    if len(groups) != 1:
        raise UnsupportedGeometryError(
            "this model has several KV cache groups",
            got=", ".join(sorted({type(spec).__name__ for spec in specs})) or "no group",
            expected="one group, of full attention in all layers",
            remedy="For a model with sliding windows start vLLM with --disable-hybrid-kv-cache-manager: it then keeps "
            "all tokens of all layers, which kvhoist serves, in more device memory. State layers are not served.",
        )
    for spec in _layer_specs(specs[0]):
        if type(spec) not in _SERVED_SPECS or getattr(spec, "non_causal", False):
            raise UnsupportedGeometryError(
                "this model's KV cache is not of plain full attention",
                got=f"{type(spec).__name__}{' (not causal)' if type(spec) in _SERVED_SPECS else ''}",
                choices=[served.__name__ for served in _SERVED_SPECS],
            )
    return 0, specs[0]


def check_engine(vllm_config: Any, kv_cache_config: Any, options: ConnectorOptions) -> None:
    """Raise ConfigError for settings of vLLM under which a hit could be wrong, or none could ever be."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if not cache.enable_prefix_caching:
        raise ConfigError(
            "vLLM's prefix caching is off, and with it the reuse of prefixes that kvhoist serves",
            remedy="Remove --no-enable-prefix-caching, or the connector.",
        )
    if vllm_config.lora_config is not None and not compat.hashes_lora_content():
        raise ConfigError(
            "this vLLM release tells LoRA adapters apart by name only, so that one could get another's cache",
            remedy="Serve the adapter with a newer vLLM (0.32), or without the connector.",
        )
    if options.storage is not None and not compat.block_hashes_last(vllm_config):
        raise ConfigError(
            "this engine's block hashes are seeded at random: nothing in storage could be a hit after a restart",
            remedy="Set PYTHONHASHSEED=0 (the same for all engines that share the storage), or leave storage out; "
            "newer vLLM releases with --prefix-caching-hash-algo sha256 need neither.",
        )
    if compat.zeroes_before_hooks(vllm_config, kv_cache_config):
        raise ConfigError(
            "vLLM's second model runner zeroes blocks of this model, whose KV has several precisions, before kvhoist "
            "can finish reading them",
            remedy="Set VLLM_USE_V2_MODEL_RUNNER=0, or cache all layers in one --kv-cache-dtype.",
        )
    if parallel.pipeline_parallel_size > 1 and not compat.KNOWS_ALL_RANKS:
        raise ConfigError("pipeline parallelism needs a newer vLLM (0.32)", got=parallel.pipeline_parallel_size)


def page_shape(vllm_config: Any, kv_cache_config: Any, options: ConnectorOptions) -> PageShape:
    _, spec = served_group(kv_cache_config)
    hash_tokens = compat.hash_tokens(vllm_config, kv_cache_config, spec.block_size)
    return PageShape.of(spec.block_size, hash_tokens, options.blocks_per_page)


def start_worker(
    vllm_config: Any, kv_cache_config: Any, options: ConnectorOptions, kv_caches: Mapping[str, Any]
) -> tuple[WorkerSide, WorkerReport]:
    """Build the worker's side over the caches that vLLM registered, and what it reports to the scheduler's."""
    group_id, spec = served_group(kv_cache_config)
    shape = page_shape(vllm_config, kv_cache_config, options)
    names = kv_cache_config.kv_cache_groups[group_id].layer_names
    attention_modules = _TWO_ATTENTIONS.count(str(vllm_config.model_config.hf_config.model_type)) + 1
    caches = read_kv_caches(
        kv_caches,
        names,
        lambda name: extract_layer_index(name, attention_modules),
        num_blocks=kv_cache_config.num_blocks,
        block_tokens=spec.block_size,
        blocks_per_page=shape.blocks_per_page,
        block_dim=lambda name, _: compat.block_dim(vllm_config, name, _spec_of(spec, name)),
        backend_of=lambda name: compat.backend_name(vllm_config, name, _spec_of(spec, name)),
    )
    parallel = vllm_config.parallel_config
    place = _place(vllm_config, kv_cache_config)
    if (parallel.data_parallel_index or parallel.data_parallel_external_lb) and parallel.data_parallel_size_local <= 1:
        _log.warning(
            "kvhoist: this engine has siblings that it cannot count: host_bytes is what each of them takes, "
            "so divide it by the number of engines on this node"
        )
    ranks = ranks_on_node(
        world_size=parallel.world_size,
        nodes_per_engine=parallel.nnodes_within_dp,
        engines_on_node=max(1, parallel.data_parallel_size_local),
    )
    side = WorkerSide(caches, options, place, host_bytes_of_rank(options.host_bytes, ranks))
    report = WorkerReport(
        rank=place.rank,
        num_ranks=place.num_ranks,
        num_host_pages=side.arena.num_pages,
        page_tokens=caches.group.page_tokens,
        blocks_per_page=caches.group.blocks_per_page,
        components=tuple((c.name, c.layers, c.row_bytes, c.tokens_per_row) for c in caches.group.components),
        block_order=caches.block_order,
        options=asdict(options),
    )
    return side, report


def start_scheduler(
    vllm_config: Any, kv_cache_config: Any, options: ConnectorOptions, reports: Sequence[WorkerReport]
) -> SchedulerSide:
    """Build the scheduler's side for the ranks that reported. Raises ConfigError where they disagree or one could not
    start."""
    reports = _agreed(reports, vllm_config.parallel_config.tensor_parallel_size)
    group_id, _ = served_group(kv_cache_config)
    num_pages = min(report.num_host_pages for report in reports)
    plane = ControlPlane(
        group_of(reports[0]),
        Directory({Tier.HOST: num_pages}, eviction=options.eviction, history_pages=options.history_pages),
        options.policy(),
        device_owned=False,
        num_ranks=len(reports),
        has_storage=options.storage is not None,
        persists=options.persists,
        host_retain=options.host_retain,
        early_persist=True,
        clock=time.monotonic,
    )
    role = vllm_config.kv_transfer_config
    namespace = engine_namespace(vllm_config, reports, weights_id=options.weights_id, tenant=options.tenant)
    _log.info(
        "kvhoist %s is on: the host tier holds %d pages of %d tokens (%d tokens); storage: %s; namespace %s",
        __version__,
        num_pages,
        reports[0].page_tokens,
        num_pages * reports[0].page_tokens,
        options.storage or "none",
        namespace.digest.hex()[:16],
    )
    return SchedulerSide(
        plane,
        namespace,
        page_shape(vllm_config, kv_cache_config, options),
        Waits(options.lookup_timeout_s, options.prefetching()),
        group_id=group_id,
        num_held_back=compat.held_back_blocks(vllm_config),
        loads=role.is_kv_consumer,
        offers=role.is_kv_producer,
        sync=options.layerwise and _hears_in_time(vllm_config),
        audit_every_s=30.0 if options.debug_verify else None,
        address=options.storage,
    )


def room_for_loads(vllm_config: Any, kv_cache_config: Any) -> Room:
    speculative = vllm_config.speculative_config
    drafted = 0 if speculative is None else int(speculative.num_speculative_tokens or 0)
    _, spec = served_group(kv_cache_config)
    return Room(kv_cache_config.num_blocks - 1, spec.block_size, drafted)  # one block is vLLM's null block


def _hears_in_time(vllm_config: Any) -> bool:
    """Tell whether vLLM hears that a load within a step failed before it plans the next step. Where it does not, the
    next step computes with what was not loaded, and its tokens and pages stand."""
    parallel = vllm_config.parallel_config
    if not vllm_config.scheduler_config.async_scheduling and parallel.pipeline_parallel_size == 1:
        return True
    _log.warning(
        "kvhoist: layerwise has no effect: this engine plans a step before it hears of the one before, so that a load "
        "that fails within a step would be heard of too late. Use --no-async-scheduling without pipeline parallelism, "
        "or leave layerwise out, which gives full CUDA graphs back."
    )
    return False


def _agreed(reports: Sequence[WorkerReport], ranks_a_stage: int) -> list[WorkerReport]:
    """Return one report a rank, in order. Pipeline stages may hold different layers, the ranks of a stage may not."""
    by_rank = {report.rank: report for report in sorted(reports, key=lambda report: report.rank)}
    failed = next((report for report in by_rank.values() if report.error), None)
    if failed is not None:
        raise ConfigError(f"rank {failed.rank} could not start", got=failed.error)
    ordered = list(by_rank.values())
    first = ordered[0] if ordered else None
    if first is None or list(by_rank) != list(range(first.num_ranks)):
        raise ConfigError(
            "not every rank has reported", got=list(by_rank), expected=f"{first.num_ranks if first else 'some'} ranks"
        )
    for name, peers in _COMPARED.items():
        for i, report in enumerate(ordered):
            peer = ordered[i - i % ranks_a_stage if peers == "stage" else 0]
            if getattr(report, name) != getattr(peer, name):
                raise ConfigError(
                    f"ranks disagree on {name}",
                    got=f"rank {peer.rank}: {getattr(peer, name)!r}; rank {i}: {getattr(report, name)!r}",
                    remedy="Start all ranks with the same versions and settings.",
                )
    return ordered


def _place(vllm_config: Any, kv_cache_config: Any) -> Place:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads = compat.kv_heads(model)
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is not None and draft is not model:
        heads += compat.kv_heads(draft)
    rank = parallel.rank % (parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    return place_of(
        tp_size=parallel.tensor_parallel_size,
        tp_rank=rank % parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        pp_rank=rank // parallel.tensor_parallel_size,
        kv_heads=heads,
        kv_tp_replicas=compat.kv_replicas(kv_cache_config),
        dcp_size=parallel.decode_context_parallel_size,
        pcp_size=parallel.prefill_context_parallel_size,
    )


def _layer_specs(spec: Any) -> list[Any]:
    return list(spec.kv_cache_specs.values()) if type(spec) is UniformTypeKVCacheSpecs else [spec]


def _spec_of(spec: Any, layer_name: str) -> Any:
    return spec.kv_cache_specs[layer_name] if type(spec) is UniformTypeKVCacheSpecs else spec
