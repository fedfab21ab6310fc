"""The namespace of an engine: what changes it, what does not, and what cannot be named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import LlamaConfig

from kvhoist.adapters.vllm import compat
from kvhoist.adapters.vllm.identity import engine_namespace
from kvhoist.adapters.vllm.metadata import WorkerReport
from kvhoist.control.namespace import Namespace
from kvhoist.errors import ConfigError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file({"w": np.arange(64, dtype=np.float32)}, str(tmp_path / "model.safetensors"))
    return tmp_path


def vllm_config(folder: Path | str, **changes: Any) -> SimpleNamespace:
    """Stand in for VllmConfig, with the fields that identity reads under their real names."""
    hf_config = LlamaConfig(num_hidden_layers=2, **changes.pop("hf", {}))
    model = {
        "model": str(folder), "revision": None, "hf_config": hf_config, "dtype": torch.bfloat16,
        "quantization": None, "max_model_len": 1024,
    }  # fmt: skip
    cache = {"cache_dtype": "auto", "prefix_caching_hash_algo": "sha256"}
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    load = {"load_format": "auto", "download_dir": None}
    for part in (model, cache, parallel, load):
        part.update({name: changes.pop(name) for name in list(changes) if name in part})
    cache.update(changes.pop("cache", {}))
    assert not changes
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(**cache),
        parallel_config=SimpleNamespace(**parallel),
        load_config=SimpleNamespace(**load),
        speculative_config=None,
    )


def report(rank: int = 0, layers: tuple[int, ...] = (0, 1), row_bytes: int = 64, order: str = "CPU") -> WorkerReport:
    return WorkerReport(rank, 1, None, 8, 16, 1, (("block", layers, row_bytes, 16),), order)


def name(config: SimpleNamespace, *reports: WorkerReport, weights_id: str | None = None, tenant: str = "") -> Namespace:
    return engine_namespace(config, reports or (report(),), weights_id=weights_id, tenant=tenant)


def test_the_same_engine_has_the_same_namespace(checkpoint: Path) -> None:
    assert name(vllm_config(checkpoint)) == name(vllm_config(checkpoint))


def test_the_folder_and_the_longest_context_are_not_part_of_it(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    assert name(vllm_config(other, max_model_len=2048)) == name(vllm_config(checkpoint))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype": torch.float16}, "kv_dtype"),
        ({"cache_dtype": "fp8"}, "kv_dtype"),
        ({"quantization": "fp8"}, "compute.quantization"),
        ({"tensor_parallel_size": 2}, "parallel.tensor"),
        ({"pipeline_parallel_size": 2}, "parallel.pipeline"),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, "compute.block_hash"),
        ({"hf": {"rms_norm_eps": 1e-3}}, "config.rms_norm_eps"),
    ],
)
def test_what_determines_the_bytes_is_part_of_it(checkpoint: Path, changes: dict[str, Any], field: str) -> None:
    assert field in name(vllm_config(checkpoint, **changes)).differs_from(name(vllm_config(checkpoint)))


def test_layouts_weights_and_tenants_are_part_of_it(checkpoint: Path) -> None:
    first = name(vllm_config(checkpoint))
    assert name(vllm_config(checkpoint), report(order="OTHER")).differs_from(first) == ["block_order"]
    assert name(vllm_config(checkpoint), tenant="acme").differs_from(first) == ["tenant"]
    assert name(vllm_config(checkpoint), weights_id="v2").differs_from(first) == ["weights_id"]
    assert name(vllm_config(checkpoint), report(row_bytes=128)) != first
    save_file({"w": np.ones(64, dtype=np.float32)}, str(checkpoint / "model.safetensors"))
    assert name(vllm_config(checkpoint)).differs_from(first) == ["weights_id"]


def test_each_pipeline_stage_is_part_of_it(checkpoint: Path) -> None:
    both = name(vllm_config(checkpoint), report(0, (0,)), report(1, (1,)))
    assert both != name(vllm_config(checkpoint), report(0, (0,)), report(1, (2,)))
    assert both != name(vllm_config(checkpoint), report(0, (0,)), report(1, (0,)))


def test_rope_that_depends_on_the_longest_context_makes_it_part_of_the_namespace(checkpoint: Path) -> None:
    rope = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    short = name(vllm_config(checkpoint, hf=rope, max_model_len=1024))
    assert name(vllm_config(checkpoint, hf=rope, max_model_len=2048)).differs_from(short) == ["compute.max_model_len"]


def test_weights_and_scales_that_nobody_can_name_are_shared_with_nobody(checkpoint: Path) -> None:
    for changes in ({"load_format": "dummy"}, {"cache": {"calculate_kv_scales": True}}):
        assert name(vllm_config(checkpoint, **changes)) != name(vllm_config(checkpoint, **changes))


def test_a_model_without_weight_files_asks_for_a_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match=r"no fingerprint.*weights_id"):
        name(vllm_config(tmp_path))
    assert dict(name(vllm_config(tmp_path), weights_id="mine").fields)["weights_id"] == '"mine"'


def test_what_this_release_does_with_block_hashes_is_found_by_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for algorithm in ("sha256", "sha256_cbor"):
        lasts = compat.block_hashes_last(vllm_config("", prefix_caching_hash_algo=algorithm))
        assert lasts == compat.hashes_lora_content(), "0.32 does both, 0.20 neither"
    assert not compat.block_hashes_last(vllm_config("", prefix_caching_hash_algo="xxhash"))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert compat.block_hashes_last(vllm_config("", prefix_caching_hash_algo="xxhash"))
