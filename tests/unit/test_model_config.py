from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from kvhoist.errors import ConfigError, GeometryError, UnsupportedGeometryError
from kvhoist.geometry import CacheGeometry
from kvhoist.model_config import ModelCache, canonical_dtype, dtype_bytes, kv_dtype_of, read_model_config

TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
MLA = {
    **TINY,
    **EXPERTS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}

REAL_MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {**TINY, **HEADS}),
    ("Llama", {**TINY, **HEADS, "num_key_value_heads": 4}),
    ("Llama", {**TINY, **HEADS, "num_key_value_heads": 1}),
    ("Llama", {**TINY, **HEADS, "head_dim": 24}),
    ("Qwen2", {**TINY, **HEADS}),
    ("Qwen3", {**TINY, **HEADS, "head_dim": 16}),
    ("Mistral", {**TINY, **HEADS, "sliding_window": None, "head_dim": 8}),
    ("Phi3", {**TINY, **HEADS}),
    ("GPTNeoX", {**TINY, "num_attention_heads": 4}),
    ("GPT2", {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}),
    ("GPTBigCode", {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "multi_query": True}),
    ("Falcon", {**TINY, "num_attention_heads": 4, "multi_query": True, "new_decoder_architecture": False}),
    ("DeepseekV2", MLA),
    ("DeepseekV3", MLA),
]


@pytest.mark.parametrize(("family", "fields"), REAL_MODELS, ids=[f"{f}-{i}" for i, (f, _) in enumerate(REAL_MODELS)])
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_model_caches_the_bytes_that_its_config_tells(
    family: str, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    """Runs a tiny random model and weighs its DynamicCache, layer by layer."""
    config = getattr(transformers, f"{family}Config")(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    cache, num_tokens = DynamicCache(config=config), 5
    with torch.no_grad():
        model(torch.arange(num_tokens)[None], past_key_values=cache, use_cache=True)
    read = read_model_config(config, kv_dtype=str(dtype))
    for layer, real in enumerate(cache.layers):
        rows = sum(row.row_bytes for row in read.rows if layer in row.layers)
        assert rows * num_tokens == real.keys.nbytes + real.values.nbytes
    from_json = read_model_config({**config.to_dict(), "dtype": str(dtype)})
    assert from_json == read


def rows_of(cache: ModelCache) -> dict[str, tuple[int, int]]:
    return {row.name: (len(row.layers), row.row_bytes) for row in cache.rows}


def llama(**more: Any) -> dict[str, Any]:
    return {**TINY, **HEADS, "dtype": "bfloat16", **more}


DEEPSEEK = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
}


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (llama(), {"k": (3, 32), "v": (3, 32)}),
        (llama(num_key_value_heads=None), {"k": (3, 64), "v": (3, 64)}),
        (llama(head_dim=None), {"k": (3, 32), "v": (3, 32)}),
        (llama(v_head_dim=4), {"k": (3, 32), "v": (3, 16)}),
        (llama(attention_k_eq_v=True), {"k": (3, 32)}),
        (llama(num_kv_shared_layers=1), {"k": (2, 32), "v": (2, 32)}),
        (llama(layer_types=["full_attention", "moe", "full_attention"]), {"k": (2, 32), "v": (2, 32)}),
        (llama(sliding_window=4096, use_sliding_window=False), {"k": (3, 32), "v": (3, 32)}),
        (llama(sliding_window=9, use_sliding_window=True, max_window_layers=3), {"k": (3, 32), "v": (3, 32)}),
        (llama(sliding_window=9, layer_types=["full_attention"] * 3), {"k": (3, 32), "v": (3, 32)}),
        (llama(attn_config={"kv_n_heads": 1}, num_key_value_heads=None), {"k": (3, 16), "v": (3, 16)}),
        (DEEPSEEK, {"latent": (61, 1152)}),
        ({**DEEPSEEK, "index_head_dim": 128}, {"latent": (61, 1152), "index_k": (61, 256)}),
        (
            {**DEEPSEEK, "index_head_dim": 128, "indexer_types": ["full"] * 3 + ["shared"] * 58},
            {"latent": (61, 1152), "index_k": (3, 256)},
        ),
        ({"text_config": llama(), "vision_config": {"hidden_size": 7}}, {"k": (3, 32), "v": (3, 32)}),
        ({"thinker_config": {"text_config": llama()}}, {"k": (3, 32), "v": (3, 32)}),
        ({"text_config": {**TINY, **HEADS}, "dtype": "float16"}, {"k": (3, 32), "v": (3, 32)}),
    ],
)
def test_fields_of_a_config_give_rows(config: dict[str, Any], rows: dict[str, tuple[int, int]]) -> None:
    assert rows_of(read_model_config(config)) == rows


def test_fp8_latent_has_half_the_bytes() -> None:
    assert rows_of(read_model_config(DEEPSEEK, kv_dtype="fp8")) == {"latent": (61, 576)}


def test_geometry_is_built_from_a_config() -> None:
    geometry = CacheGeometry.from_config(DEEPSEEK, page_tokens=64, blocks_per_page=4)
    assert geometry.page_bytes == 61 * 64 * 1152
    smollm2 = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    assert CacheGeometry.from_config(smollm2, page_tokens=1, kv_dtype="bfloat16").page_bytes == 23_040


REFUSED: list[tuple[Any, str]] = [
    (transformers.Gemma2Config(), "sliding_attention in layers 0, 2, 4"),
    (transformers.Gemma3Config(), "sliding_attention in layers 0-4, 6-10"),
    (transformers.MistralConfig(), r"sliding_attention \(sliding_window=4096\) in layers 0-31"),
    (transformers.GptOssConfig(), "sliding_attention in layers 0, 2"),
    (transformers.Llama4TextConfig(), "chunked_attention in layers 0-2"),
    (transformers.Qwen3NextConfig(), "linear_attention in layers 0-2"),
    (transformers.MambaConfig(), "linear_attention in layers 0-31"),
    (transformers.JambaConfig(), "linear_attention in layers 0-3, 5-11"),
    (transformers.DeepseekV4Config(), "compressed_sparse_attention"),
    (transformers.GPTNeoConfig(), "local in layers 1, 3"),
    (transformers.NemotronHConfig(), "linear_attention"),
    (transformers.RwkvConfig(), "rescale_every"),
    (transformers.xLSTMConfig(), "chunkwise_kernel"),
]


@pytest.mark.parametrize(("config", "text"), REFUSED, ids=[type(config).__name__ for config, _ in REFUSED])
def test_window_and_state_layers_are_refused_by_layer(config: Any, text: str) -> None:
    with pytest.raises(UnsupportedGeometryError, match=text):
        read_model_config(config, kv_dtype="bfloat16")
    with pytest.raises(UnsupportedGeometryError):
        read_model_config(config.to_dict(), kv_dtype="bfloat16")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"sliding_window": 4096}, "layers 0-2"),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2}, "layers 2;"),
        ({"sliding_window": 4096, "use_sliding_window": None}, "layers 0-2"),
        ({"attention_chunk_size": 8}, "chunked_attention"),
        ({"layer_types": ["full_attention", "sliding_attention", "mamba"]}, "mamba, sliding_attention in layers 1-2"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"is_encoder_decoder": True}, "cross-attention"),
        ({"per_layer_config": {"1": {"head_dim": 512}}}, "from layer to layer"),
    ],
)
def test_config_json_of_an_unserved_model_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedGeometryError, match=text):
        read_model_config(llama(**fields))


def test_a_config_object_whose_rows_differ_by_layer_is_refused() -> None:
    config = transformers.Gemma4TextConfig(layer_types=["full_attention"] * 30)
    with pytest.raises(UnsupportedGeometryError, match="from layer to layer"):
        read_model_config(config, kv_dtype="bfloat16")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is out of range; got 0"),
        ({"num_hidden_layers": -2}, "num_hidden_layers"),
        ({"num_attention_heads": 2.0, "num_key_value_heads": None}, "num_attention_heads"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"num_key_value_heads": [1, 2, 3]}, "num_key_value_heads"),
        ({"head_dim": 10**12}, "head_dim"),
        ({"hidden_size": 33}, "no whole number of heads"),
        ({"v_head_dim": 0}, "v_head_dim"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"kv_lora_rank": 8}, "lacks qk_rope_head_dim"),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 8, "index_head_dim": -1}, "index_head_dim"),
        ({"num_kv_shared_layers": 3}, "no layer"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
        ({"layer_types": ["full_attention"]}, "not one a layer"),
        ({"layer_types": ["moe"] * 3}, "no layer"),
        ({"dtype": "complex64"}, "unknown KV dtype"),
        ({"dtype": None}, "names no dtype.*kv_dtype='bfloat16'"),
    ],
)
def test_a_size_that_cannot_be_is_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(GeometryError, match=text):
        read_model_config(llama(**fields))


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads"])
def test_a_missing_size_is_named(name: str) -> None:
    config = {k: v for k, v in llama(num_key_value_heads=None).items() if k != name}
    with pytest.raises(GeometryError, match=f"the config lacks .*{name}"):
        read_model_config(config)


@pytest.mark.parametrize("config", [None, "model", 7, [1]])
def test_what_is_no_config_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="not a model config"):
        read_model_config(config)


@pytest.mark.parametrize(
    ("name", "canonical", "num_bytes"),
    [
        ("bf16", "bfloat16", 2),
        (torch.float16, "float16", 2),
        ("torch.float32", "float32", 4),
        ("FP8", "float8_e4m3fn", 1),
        ("fp8_e5m2", "float8_e5m2", 1),
        (torch.float8_e4m3fnuz, "float8_e4m3fnuz", 1),
        ("int8", "int8", 1),
    ],
)
def test_dtypes_have_one_name_and_a_width(name: Any, canonical: str, num_bytes: int) -> None:
    assert (canonical_dtype(name), dtype_bytes(name)) == (canonical, num_bytes)


@pytest.mark.parametrize("name", ["", "nvfp4", "auto", "int4", None])
def test_an_unknown_dtype_is_refused_with_the_choices(name: Any) -> None:
    with pytest.raises(GeometryError, match=r"valid choices: .*bfloat16"):
        dtype_bytes(name)


def test_auto_is_the_configs_dtype() -> None:
    assert kv_dtype_of(llama()) == kv_dtype_of(llama(), "auto") == "bfloat16"
    assert kv_dtype_of(llama(), "fp8") == "float8_e4m3fn"
    assert kv_dtype_of(transformers.LlamaConfig(dtype=torch.float16)) == "float16"
    assert kv_dtype_of({"torch_dtype": "float32", "text_config": {"hidden_size": 1}}) == "float32"
