"""What a model caches is read off the model, agrees with its config, and is refused where it is not served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import VOCABULARY, prompt_of, tiny_config, tiny_model

from kvhoist.adapters.transformers import probe_shape
from kvhoist.adapters.transformers.shape import cache_keyword
from kvhoist.errors import ConfigError, GeometryError, UnsupportedGeometryError
from kvhoist.geometry import CacheGeometry


def test_a_page_has_exactly_the_bytes_that_the_model_caches(any_model: Any) -> None:
    shape = probe_shape(any_model, page_tokens=4)
    output = any_model(torch.tensor([prompt_of(12)]), use_cache=True)
    layers = output[cache_keyword(any_model)].layers
    cached_bytes = sum(t.numel() * t.element_size() for layer in layers for t in (layer.keys, layer.values))
    assert shape.geometry.page_bytes * 3 == cached_bytes
    assert shape.geometry == CacheGeometry.from_config(any_model.config, page_tokens=4)


def test_mla_is_one_latent_row_in_two_parts() -> None:
    shape = probe_shape(tiny_model(tiny_config("deepseek_v3")), page_tokens=4)
    assert [c.name for c in shape.group.components] == ["latent"]
    assert [(p.attribute, p.row_elements, p.first_element) for p in shape.parts] == [("keys", 16, 0), ("values", 8, 16)]


def test_the_dtype_is_the_models_own_not_the_configs() -> None:
    shape = probe_shape(tiny_model(tiny_config("llama", dtype="float32"), dtype=torch.bfloat16), page_tokens=4)
    assert (shape.dtype, shape.dtype_name) == (torch.bfloat16, "bfloat16")
    assert shape.token_bytes == 2 * 2 * 2 * 8 * 2


_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": None}


def _refused() -> dict[str, Any]:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    return {
        "window": transformers.MistralConfig(**_SIZES, **heads, sliding_window=8),
        "some windows": transformers.Gemma3TextConfig(**{**_SIZES, **heads, "num_hidden_layers": 6, "head_dim": 8}),
        "state": transformers.MambaConfig(**_SIZES, state_size=4),
    }


@pytest.mark.parametrize("kind", ["window", "some windows", "state"])
def test_window_and_state_layers_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedGeometryError):
        probe_shape(tiny_model(_refused()[kind]), page_tokens=4)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_is_refused(rope_type: str) -> None:
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    if rope_type == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    model = tiny_model(tiny_config("llama", rope_parameters=parameters))
    with pytest.raises(UnsupportedGeometryError, match=rope_type):
        probe_shape(model, page_tokens=4)


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="eval"):
        probe_shape(tiny_model(tiny_config("llama")).train(), page_tokens=4)


def test_a_config_that_disagrees_with_the_forward_is_an_error() -> None:
    model = tiny_model(tiny_config("llama"))
    model.config.num_key_value_heads = 4
    with pytest.raises(GeometryError, match="other bytes than its config says"):
        probe_shape(model, page_tokens=4)
