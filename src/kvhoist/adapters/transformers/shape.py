"""What a transformers model really caches: probed by a forward of one token, and checked against its config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvhoist.errors import ConfigError, GeometryError, UnsupportedGeometryError
from kvhoist.geometry import CacheGeometry, CacheGroup

_MOVING_ROPE = ("dynamic", "longrope")
"""RoPE kinds whose angles depend on the length of the whole sequence, so that a prefix has no bytes of its own."""


@dataclass(frozen=True, slots=True)
class CachedPart:
    """One tensor of a cache layer, `[batch, num_heads, tokens, head_dim]`, and its place in a page's rows: elements
    `first_element` to `first_element + num_heads * head_dim` of a row of `component`."""

    attribute: str
    component: str
    num_heads: int
    head_dim: int
    first_element: int = 0

    @property
    def row_elements(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class CacheShape:
    """All that is cached for one model: the same parts in each of `num_layers` layers, of one dtype on one device."""

    num_layers: int
    parts: tuple[CachedPart, ...]
    dtype: torch.dtype
    device: torch.device
    geometry: CacheGeometry

    @property
    def group(self) -> CacheGroup:
        return self.geometry.groups[0]

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def token_bytes(self) -> int:
        return self.group.page_bytes // self.group.page_tokens


def cache_keyword(model: Any) -> str:
    """Return the forward's name for the cache: `cache` in newer releases of transformers, `past_key_values` before."""
    parameters = signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UnsupportedGeometryError(
        "this model's forward takes no KV cache",
        got=type(model).__name__,
        expected="a causal language model of transformers >= 5",
    )


def probe_shape(model: Any, *, page_tokens: int) -> CacheShape:
    """Run `model` on one token, read the shapes of what it cached, and describe that as pages of `page_tokens`.

    The forward decides what is cached, the config must agree: for MLA `keys` and `values` may be the two parts of the
    `latent` row (transformers now) or the expanded K and V (older releases); K-only families that keep V too are `k`
    and `v` here. Raises UnsupportedGeometryError for window, state and indexed layers, for layers that differ and for
    RoPE that depends on the length; GeometryError where config and forward disagree; ConfigError for a model that is
    spread over several devices or in training mode.
    """
    if getattr(getattr(model, "config", None), "get_text_config", None) is None:
        raise ConfigError(
            "this is no model of transformers",
            got=type(model).__name__,
            expected="a causal language model of transformers >= 5",
        )
    config = model.config.get_text_config(decoder=True)
    _refuse_moving_rope(config)
    _check_mode(model)
    layers = _layers_of_one_token(model)
    keys, values = layers[0].keys, layers[0].values
    element = keys.element_size()
    dtype_name = str(keys.dtype).removeprefix("torch.")
    described = CacheGeometry.from_config(config, page_tokens=page_tokens, kv_dtype=dtype_name)
    rows = {c.name: c.row_bytes for c in described.groups[0].components}
    k_bytes, v_bytes = (t.shape[1] * t.shape[3] * element for t in (keys, values))
    if set(rows) == {"latent"} and rows["latent"] == k_bytes + v_bytes:
        geometry, names, starts = described, ("latent", "latent"), (0, keys.shape[1] * keys.shape[3])
    else:
        geometry = CacheGeometry.attention(
            len(layers), k_row_bytes=k_bytes, v_row_bytes=v_bytes, page_tokens=page_tokens
        )
        names, starts = ("k", "v"), (0, 0)
        if set(rows) == {"k", "v"} and geometry != described:
            raise GeometryError(
                "the model caches other bytes than its config says",
                got=f"{len(layers)} layers of {k_bytes} + {v_bytes} bytes a token",
                expected=f"{len(described.groups[0].layers)} layers of {rows['k']} + {rows['v']} bytes a token",
                remedy="Report this model: its config fields mean something new.",
            )
    parts = tuple(
        CachedPart(attribute, name, tensor.shape[1], tensor.shape[3], start)
        for attribute, name, tensor, start in zip(("keys", "values"), names, (keys, values), starts, strict=True)
    )
    return CacheShape(len(layers), parts, keys.dtype, keys.device, geometry)


def _check_mode(model: Any) -> None:
    if any(module.training for module in model.modules()):
        raise ConfigError(
            "the model is in training mode, where dropout makes every forward different", remedy="Call model.eval()."
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or "meta" in {device.type for device in devices}:
        raise ConfigError(
            "the model's weights are not on one device",
            got=", ".join(sorted(map(str, devices))),
            expected="all weights in the memory of one device",
            remedy="Load it without device_map, or use an engine that shards models.",
        )


def _layers_of_one_token(model: Any) -> list[Any]:
    device = next(model.parameters()).device
    with torch.inference_mode():
        output = model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=device), use_cache=True)
    layers = list(getattr(output[cache_keyword(model)], "layers", ()))
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if odd or not layers:
        raise UnsupportedGeometryError(
            "this model's cache has layers that are not served yet",
            got=", ".join(odd) or "no cache layers",
            expected="full attention in every layer (DynamicLayer)",
            remedy="Run it without kvhoist, or use an engine adapter that leaves those layers to the engine.",
        )
    seen = {(_heads_and_dim(t.keys), _heads_and_dim(t.values), t.keys.dtype, t.values.dtype) for t in layers}
    if len(seen) != 1:
        raise UnsupportedGeometryError(
            "this model's layers cache rows of different shapes, which is not served yet",
            got=sorted(map(str, seen)),
            expected="the same heads, head_dim and dtype in every layer",
        )
    return layers


def _heads_and_dim(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.shape[1], tensor.shape[3]


def _refuse_moving_rope(config: Any) -> None:
    for kind in _rope_kinds(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)):
        if kind in _MOVING_ROPE:
            raise UnsupportedGeometryError(
                "this model's RoPE angles depend on the length of the sequence, so a prefix's K cannot be reused",
                got=f"rope_type {kind!r}",
                expected="a rope_type whose angles depend on the position alone (default, linear, llama3, yarn)",
            )


def _rope_kinds(parameters: Any) -> Iterator[str]:
    if isinstance(parameters, Mapping):
        for name, value in parameters.items():
            if name in ("rope_type", "type"):
                yield str(value)
            yield from _rope_kinds(value)
