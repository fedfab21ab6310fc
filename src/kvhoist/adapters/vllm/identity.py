"""The namespace of a vLLM engine: its model, weights, numbers and layout."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import snapshot_download

from kvhoist.adapters.vllm import compat
from kvhoist.adapters.vllm.metadata import WorkerReport
from kvhoist.control.namespace import Namespace, ParallelLayout
from kvhoist.errors import ConfigError
from kvhoist.fingerprint import fingerprint_checkpoint
from kvhoist.geometry import CacheGeometry, CacheGroup, Component
from kvhoist.settings import Settings

_PLAIN_ROPE = (None, "default", "linear", "llama3", "mrope")
"""RoPE types whose frequencies do not depend on the longest context that the engine serves."""


def engine_namespace(
    vllm_config: Any, reports: Sequence[WorkerReport], *, weights_id: str | None, tenant: str
) -> Namespace:
    """Name all that determines the bytes of this engine's pages. `reports` are the ranks', in order.

    Takes a fingerprint of the checkpoint's files unless `weights_id` is given (up to 2 s). Raises ConfigError where
    neither is possible.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    config = _plain(model.hf_config.to_dict())
    kv_dtype = str(model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype)
    compute = {
        "dtype": str(model.dtype),
        "engine": "vllm",
        "quantization": str(model.quantization),
        "draft": _draft_id(vllm_config),
        "block_hash": str(cache.prefix_caching_hash_algo),
    }
    if not _is_plain_rope(config):
        compute["max_model_len"] = str(model.max_model_len)
    return Namespace.create(
        model_id="/".join([str(config.get("model_type", "unknown")), *map(str, config.get("architectures") or ())]),
        weights_id=weights_id or _weights_id(model, vllm_config.load_config),
        geometry=CacheGeometry(_groups(reports)),
        kv_dtype=kv_dtype,
        config=config,
        kv_scales=f"computed:{uuid.uuid4()}" if compat.has_dynamic_scales(vllm_config) else "checkpoint",
        lora="in the block hash",
        tenant=tenant,
        tenant_secret=Settings.from_env().store_secret,
        block_order=" | ".join(dict.fromkeys(report.block_order for report in reports)),
        parallel=ParallelLayout(tensor=parallel.tensor_parallel_size, pipeline=parallel.pipeline_parallel_size),
        compute=compute,
    )


def group_of(report: WorkerReport) -> CacheGroup:
    """Return the cache group that a rank described."""
    components = tuple(Component(*component) for component in report.components)
    return CacheGroup(components, report.page_tokens, report.blocks_per_page)


def _groups(reports: Sequence[WorkerReport]) -> tuple[CacheGroup, ...]:
    """Return the ranks' groups, each once: one, or one a pipeline stage."""
    return tuple(dict.fromkeys(group_of(report) for report in reports))


def _weights_id(model: Any, load: Any) -> str:
    """Return the fingerprint of the checkpoint that vLLM has loaded."""
    if str(load.load_format) == "dummy":
        return f"dummy:{uuid.uuid4()}"  # weights of nobody are shared with nobody
    try:
        folder = model.model
        if not os.path.exists(folder):
            folder = snapshot_download(
                folder, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
            )
        return fingerprint_checkpoint(folder)
    except (ConfigError, OSError, ValueError) as error:
        raise ConfigError(
            "no fingerprint of the model's weights could be taken",
            got=f"{model.model}: {error}",
            remedy='Name the weights yourself: "weights_id" in kv_connector_extra_config, one for each set of weights.',
        ) from error


def _draft_id(vllm_config: Any) -> str:
    """Return which drafter's layers may be among the cached ones."""
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    if draft is None or draft.model == vllm_config.model_config.model:
        return "none" if draft is None else "of the model itself"
    return _weights_id(draft, vllm_config.load_config)


def _is_plain_rope(config: Mapping[str, Any]) -> bool:
    """Tell whether every RoPE of the config turns a position by one angle, whatever the engine's longest context."""
    found: list[Any] = []

    def visit(value: Any) -> None:
        if isinstance(value, Mapping):
            for key, nested in value.items():
                if key in ("rope_type", "type") and isinstance(nested, str):
                    found.append(nested)
                visit(nested)
        elif isinstance(value, list):
            for nested in value:
                visit(nested)

    visit({key: value for key, value in config.items() if "rope" in key or key.endswith("config")})
    return all(kind in _PLAIN_ROPE for kind in found)


def _plain(config: Any) -> dict[str, Any]:
    """Return a config as JSON has it."""
    plain: dict[str, Any] = json.loads(json.dumps(config, default=str, sort_keys=True))
    return plain
