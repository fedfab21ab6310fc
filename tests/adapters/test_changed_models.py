"""A model that differs in anything that changes KV has pages of its own, before it is wrapped and after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Wrap, prompt_of, tiny_config, tiny_model

from kvhoist.adapters.transformers import Sampling
from kvhoist.adapters.transformers.identity import weights_fingerprint
from kvhoist.adapters.transformers.loading import load_model, load_tokenizer
from kvhoist.adapters.transformers.stored import explain_stored
from kvhoist.control.namespace import Namespace
from kvhoist.demo.oracles import greedy
from kvhoist.errors import ConfigError
from kvhoist.geometry import CacheGeometry
from kvhoist.storage import MemoryStore

TWO = Sampling(max_new_tokens=2)


class Adapter(torch.nn.Module):
    """A LoRA of the usual kind: the scaling is no tensor."""

    def __init__(self, base: Any, scaling: float) -> None:
        super().__init__()
        self.base, self.scaling = base, {"default": scaling}
        self.down = torch.nn.Parameter(torch.full((4, base.in_features), 0.1))
        self.up = torch.nn.Parameter(torch.full((base.out_features, 4), 0.1))

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.scaling["default"] * (x @ self.down.T @ self.up.T)


def adapt(model: Any, scaling: float = 1.0) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj = Adapter(layer.self_attn.k_proj, scaling)


def slow_down_rope(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def hook(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, given, found: found * 2)


def scale_weights(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def tiny(change: Callable[[Any], Any] = lambda model: None) -> Any:
    model = tiny_model(tiny_config("llama"))
    change(model)
    return model.eval()


def test_what_no_checkpoint_holds_is_part_of_the_fingerprint() -> None:
    changes = [lambda m: None, adapt, lambda m: adapt(m, 2.0), slow_down_rope, hook, scale_weights]
    found = [weights_fingerprint(tiny(change), None) for change in changes]
    assert len(set(found)) == len(changes)
    assert found == [weights_fingerprint(tiny(change), None) for change in changes], "the same for the same"


@pytest.mark.parametrize(
    ("change", "topic"),
    [
        (scale_weights, "other weights"),
        (lambda m: m.load_state_dict({k: v * 1.5 for k, v in m.state_dict().items()}), "other weights"),
        (lambda m: m.half(), "other weights"),
        (slow_down_rope, "other weights"),
        (adapt, "other modules"),
        (hook, "other modules"),
        (lambda m: m.train(), "other training mode"),
        (lambda m: m.model.layers[0].train(), "other training mode"),
        (lambda m: m.set_attn_implementation("eager"), "other attention implementation"),
    ],
)
def test_a_model_that_was_changed_after_it_was_wrapped_is_refused(
    wrap: Wrap, change: Callable[[Any], Any], topic: str
) -> None:
    model = tiny()
    cached = wrap(model)
    cached.generate(prompt_of(30), TWO)
    change(model)
    for call in (cached.generate, cached.stream, lambda prompt, sampling: cached.generate_batch([prompt], sampling)):
        with pytest.raises(ConfigError, match=f"{topic}.*build a new CachedModel"):
            call(prompt_of(30), TWO)


def test_another_scaling_of_an_adapter_is_a_change(wrap: Wrap) -> None:
    model = tiny(adapt)
    cached = wrap(model)
    model.model.layers[1].self_attn.k_proj.scaling["default"] = 2.0
    with pytest.raises(ConfigError, match="other modules"):
        cached.generate(prompt_of(30), TWO)


def test_autocast_is_refused_and_leaves_no_page(wrap: Wrap) -> None:
    cached = wrap(tiny())
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ConfigError, match="other autocast"):
        cached.generate(prompt_of(30), TWO)
    generation = cached.generate(prompt_of(30), TWO)
    assert generation.report.cached_tokens == 0
    assert generation.tokens == greedy(cached.model, prompt_of(30), 2).tokens


def test_a_module_in_training_mode_is_refused(wrap: Wrap) -> None:
    model = tiny()
    model.model.layers[0].train()
    with pytest.raises(ConfigError, match=r"Call model.eval\(\)"):
        wrap(model)


@pytest.mark.parametrize("thing", [None, torch.nn.Linear(2, 2).eval()])
def test_what_is_no_model_of_transformers_is_refused(wrap: Wrap, thing: Any) -> None:
    with pytest.raises(ConfigError, match="no model of transformers"):
        wrap(thing)


@pytest.mark.parametrize("config", ["{", '{"model_type": "llama"}', '{"model_type": "none such"}'])
def test_a_folder_that_cannot_be_loaded_says_so(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"the model in .* cannot be loaded"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match=r"the tokenizer in .* cannot be loaded"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["0", "-4", "many", "9" * 50, "4.5", "null"])
def test_a_note_with_a_senseless_page_length_does_not_stop_an_explanation(text: str) -> None:
    geometry = CacheGeometry.attention(1, k_row_bytes=64, v_row_bytes=64, page_tokens=4)
    ours = Namespace.create(model_id="m", weights_id="w", geometry=geometry, kv_dtype="float32")
    store = MemoryStore("1MiB")
    store.note_namespace(b"n" * 32, {"geometry.0.page_tokens": text})
    assert explain_stored(store, ours, list(range(9)), page_tokens=4).num_hit_pages == 0
