"""What a model caches a token, read from its Hugging Face config: rows by name, layers and bytes.

Only fields are read, never a family's name: a new family that uses these fields needs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvhoist.errors import ConfigError, GeometryError, UnsupportedGeometryError

_MAX_FIELD = 1 << 24
"""No real config comes near; a larger number is a slip, and products of two stay far from overflow anywhere."""

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
_LAYER_KINDS = ("layer_types", "layers_block_type", "attention_layers")
_SERVED_KINDS = ("full_attention", "indexed_attention", "attention", "global", "deepseek_sparse_attention")
_CACHELESS_KINDS = ("moe", "mlp")  # nemotron_h: feed-forward layers that are counted like attention layers
_STATE_FIELDS = (
    "ssm_cfg",
    "state_size",
    "mamba_d_state",
    "attn_layer_period",
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_num_key_heads",
    "attn_type_list",
    "full_attn_idxs",
    "block_configs",
    "block_types",
    "rescale_every",
    "chunkwise_kernel",
)
"""Present in configs of state-space, convolution and mixed models that list no layer kinds."""

_DTYPES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
_DTYPE_ALIASES = {
    "double": "float64", "float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16",
    "bf16": "bfloat16", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "float8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One component's bytes a token and layer: `k`, `v`, `latent` or `index_k`, and the layers that have it."""

    name: str
    layers: tuple[int, ...]
    row_bytes: int


@dataclass(frozen=True, slots=True)
class ModelCache:
    """All that a model caches for a token. Plain data: build one by hand where no config tells it."""

    rows: tuple[ModelRow, ...]


def canonical_dtype(name: object) -> str:
    """Return the one name of a dtype: `torch.bfloat16`, `"bf16"` and `"bfloat16"` are `"bfloat16"`; `"fp8"` is
    `"float8_e4m3fn"`. Raises GeometryError, with the valid names, for another."""
    text = str(name).removeprefix("torch.").lower()
    text = _DTYPE_ALIASES.get(text, text)
    if text not in _DTYPES:
        raise GeometryError("unknown KV dtype", got=repr(name), choices=[*_DTYPES, *_DTYPE_ALIASES, "auto"])
    return text


def dtype_bytes(name: object) -> int:
    """Return the bytes of one element of the dtype called `name`. Raises GeometryError for an unknown one."""
    return _DTYPES[canonical_dtype(name)]


def kv_dtype_of(config: object | Mapping[str, Any], kv_dtype: str | None = None) -> str:
    """Return the canonical name of `kv_dtype`, or for None and `"auto"` of the config's own dtype.

    Raises GeometryError where neither names one.
    """
    if kv_dtype is not None and kv_dtype != "auto":
        return canonical_dtype(kv_dtype)
    for get in (_getter(_text_config(config)), _getter(config)):
        named = get("dtype") or get("torch_dtype")
        if named is not None and named != "auto":
            return canonical_dtype(named)
    raise GeometryError(
        "the config names no dtype",
        expected="its field 'dtype' or 'torch_dtype', or kv_dtype",
        remedy="Pass kv_dtype='bfloat16', or what the engine keeps K and V in.",
    )


def read_model_config(config: object | Mapping[str, Any], *, kv_dtype: str | None = None) -> ModelCache:
    """Read what a model caches from its Hugging Face config: an object, or the mapping of its config.json.

    A config of several parts is read at its text part. MHA, MQA and GQA give `k` and `v`; `attention_k_eq_v` gives
    `k` alone; `kv_lora_rank` (MLA) gives `latent`, of `kv_lora_rank + qk_rope_head_dim` elements, which is what engines
    and transformers from 5 on cache; `index_head_dim` beside it adds `index_k`. Layers that reuse another layer's cache
    (`num_kv_shared_layers`) and feed-forward layers have no rows. `kv_dtype` None or `"auto"` is the config's dtype.
    Raises UnsupportedGeometryError, with the layers, for window and state layers; GeometryError, with the field, for a
    size that is missing or absurd.
    """
    get = _getter(_text_config(config))
    if get("is_encoder_decoder") is True:
        raise UnsupportedGeometryError(
            "an encoder-decoder model caches cross-attention too",
            got=get("model_type"),
            expected="a decoder-only model",
        )
    layers = _layers(get)
    element = dtype_bytes(kv_dtype_of(config, kv_dtype))
    if get("kv_lora_rank") is not None:
        return ModelCache(_latent_rows(get, layers, element))
    heads = _kv_heads(get)
    k_dim = _head_dim(get)
    k = ModelRow("k", layers, heads * k_dim * element)
    if get("attention_k_eq_v") is True:
        return ModelCache((k,))
    v_dim = k_dim if get("v_head_dim") is None else _size(get, ("v_head_dim",))
    return ModelCache((k, ModelRow("v", layers, heads * v_dim * element)))


Getter = Callable[[str], Any]


def _getter(config: object | Mapping[str, Any]) -> Getter:
    if isinstance(config, Mapping):
        return config.get
    return lambda name: getattr(config, name, None)


def _text_config(config: object | Mapping[str, Any]) -> object | Mapping[str, Any]:
    if config is None or isinstance(config, str | bytes | int | float | Sequence):
        raise ConfigError(
            "this is not a model config",
            got=repr(config),
            expected="a transformers config object or the mapping read from config.json",
        )
    for name in _TEXT_CONFIGS:
        nested = _getter(config)(name)
        if nested is not None and nested is not config:
            return _text_config(nested)
    return config


def _size(get: Getter, names: Sequence[str]) -> int:
    """Return the first of the fields `names` that is present. Raises GeometryError where it is no usable size."""
    for name in names:
        value = get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_FIELD:
            raise GeometryError(
                f"the config's {name} is out of range", got=repr(value), expected=f"an int from 1 to {_MAX_FIELD}"
            )
        return value
    raise GeometryError(
        f"the config lacks {names[0]}",
        expected=f"one of the fields {', '.join(names)}",
        remedy="Describe the cache by CacheGeometry.attention(), latent() or opaque() instead.",
    )


def _kv_heads(get: Getter) -> int:
    if get("multi_query") is True and get("new_decoder_architecture") is not True:
        return 1
    if get("multi_query_attention") is False:
        return _size(get, _HEADS)
    nested = get("attn_config")
    if nested is not None and _getter(nested)("kv_n_heads") is not None:
        return _size(_getter(nested), ("kv_n_heads",))
    return _size(get, (*_KV_HEADS, *_HEADS))


def _head_dim(get: Getter) -> int:
    if any(get(name) is not None for name in _HEAD_DIM):
        return _size(get, _HEAD_DIM)
    hidden, heads = _size(get, _HIDDEN), _size(get, _HEADS)
    if hidden % heads:
        raise GeometryError(
            "the config's hidden size is no whole number of heads, and it gives no head_dim",
            got=f"hidden size {hidden}, {heads} heads",
            expected="a multiple, or the field head_dim",
        )
    return hidden // heads


def _latent_rows(get: Getter, layers: tuple[int, ...], element: int) -> tuple[ModelRow, ...]:
    elements = _size(get, ("kv_lora_rank",)) + _size(get, ("qk_rope_head_dim",))
    latent = ModelRow("latent", layers, elements * element)
    if get("index_head_dim") is None:
        return (latent,)
    indexers = get("indexer_types")
    indexed = layers if indexers is None else tuple(layer for layer in layers if indexers[layer] != "shared")
    return (latent, ModelRow("index_k", indexed, _size(get, ("index_head_dim",)) * element))


def _layers(get: Getter) -> tuple[int, ...]:
    """Return the layers that cache KV of their own, after refusing those that are not served."""
    listed = next((kinds for kinds in map(get, _LAYER_KINDS) if kinds is not None), None)
    if listed is not None:
        _refuse_kinds(listed)
    if _differs_by_layer(get):
        raise UnsupportedGeometryError(
            "this model's rows differ in size from layer to layer, which its config alone does not tell",
            got="a per-layer config",
            remedy="Describe each size as a Component of its own with its own layers.",
        )
    has_count = any(get(name) is not None for name in _LAYERS)
    num_layers = len(listed) if listed is not None and not has_count else _size(get, _LAYERS)
    kinds = listed or _kinds_by_fields(get, num_layers)
    _refuse_kinds(kinds)
    if len(kinds) != num_layers:
        raise GeometryError(
            "the config's layer kinds are not one a layer", got=f"{len(kinds)} kinds", expected=f"{num_layers} of them"
        )
    num_shared = _size(get, ("num_kv_shared_layers",)) if get("num_kv_shared_layers") else 0
    own = [layer for layer, kind in enumerate(kinds[: num_layers - num_shared]) if kind not in _CACHELESS_KINDS]
    if not own or num_shared >= num_layers:
        raise GeometryError("no layer of this config has a KV cache of its own", got=f"{num_layers} layers")
    return tuple(own)


def _refuse_kinds(kinds: Sequence[str]) -> None:
    refused = [i for i, kind in enumerate(kinds) if kind not in (*_SERVED_KINDS, *_CACHELESS_KINDS)]
    if refused:
        raise UnsupportedGeometryError(
            "this model has window or state layers, which are not served yet",
            got=f"{', '.join(sorted({str(kinds[i]) for i in refused}))} in layers {_ranges(refused)}",
            expected="full attention in every layer",
            remedy="Leave those layers to the engine and describe the others by CacheGeometry.attention(layers=[...]).",
        )


def _kinds_by_fields(get: Getter, num_layers: int) -> list[str]:
    """Name every layer's kind where the config lists none: what cannot be told apart counts as not served."""
    for field in _STATE_FIELDS:
        if get(field) is not None:
            return [f"state or mixed ({field})"] * num_layers
    if get("attention_chunk_size") is not None:
        return ["chunked_attention"] * num_layers
    window = get("sliding_window")
    if window is None or get("use_sliding_window") is False:
        return ["full_attention"] * num_layers
    # Only the families that ask by use_sliding_window keep their first max_window_layers layers whole.
    num_full = _size(get, ("max_window_layers",)) if get("use_sliding_window") and get("max_window_layers") else 0
    num_full = min(num_full, num_layers)
    return ["full_attention"] * num_full + [f"sliding_attention (sliding_window={window})"] * (num_layers - num_full)


def _differs_by_layer(get: Getter) -> bool:
    """Tell whether rows change in size between layers, by `per_layer_config` (layer → fields that differ) of a
    config.json, or by a config object that says so, whose fields then cannot be read as one value."""
    if get("is_heterogeneous") is True or get("compress_ratios") is not None:
        return True
    overrides = get("per_layer_config")
    if not isinstance(overrides, Mapping):
        return False
    sizes = {*_KV_HEADS, *_HEADS, *_HEAD_DIM, *_HIDDEN, "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"}
    return any(sizes & set(fields) for fields in overrides.values())


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as people write them: `0-4, 6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
