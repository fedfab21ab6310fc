"""The attention implementation that leaves the mask out: only where the mask says nothing, and with the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, tiny_config, tiny_model
from transformers import MistralConfig
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
from ttft_support import assert_attends_as_a_mask_says

from kvhoist.adapters.transformers import PREFIX_ATTENTION
from kvhoist.adapters.transformers import attention as ours

WINDOW = 6


@pytest.mark.parametrize(("num_new", "num_cached"), [(5, 0), (1, 9), (5, 9), (16, 100)])
def test_it_is_causal_from_the_last_token_on(num_new: int, num_cached: int) -> None:
    assert_attends_as_a_mask_says(num_new, num_cached, torch.device("cpu"), torch.float32, 1e-5)


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_model_answers_as_with_stock_attention(sliding: bool, padded: bool) -> None:
    found, stock = (_logits_after_prefix(name, sliding, padded) for name in (PREFIX_ATTENTION, "sdpa"))
    torch.testing.assert_close(found, stock, rtol=1e-4, atol=1e-5)


def test_a_window_that_went_unseen_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = _logits_after_prefix("sdpa", sliding=True, padded=False)
    monkeypatch.setitem(_masks(), PREFIX_ATTENTION, lambda **_: None)
    assert (_logits_after_prefix(PREFIX_ATTENTION, sliding=True, padded=False) - stock).abs().max() > 1e-2


@pytest.mark.parametrize(
    "changes",
    [
        {"local_size": 4, "mask_function": sliding_window_causal_mask_function(4)},
        {"attention_mask": torch.tensor([[False] + [True] * 11])},
        {"mask_function": lambda batch, head, new, seen: seen >= 0},
        {"allow_is_causal_skip": False},
        {"q_offset": 6},
    ],
    ids=["window", "padding", "another function", "asked for", "tokens after them"],
)
def test_whatever_is_not_plain_keeps_its_mask(changes: dict[str, Any]) -> None:
    plain = {"batch_size": 1, "q_length": 4, "kv_length": 12, "q_offset": 8, "mask_function": causal_mask_function}
    assert ours.mask(**plain) is None
    kept = ours.mask(**{**plain, **changes})
    assert kept is not None
    assert kept.shape[-2:] == (4, 12)


def _masks() -> Any:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS._global_mapping


def _logits_after_prefix(attention: str, sliding: bool, padded: bool) -> torch.Tensor:
    """Return the logits of five tokens after a prefix of nine, of two rows, the second with two tokens of padding."""
    config = tiny_config("llama", attn_implementation=attention)
    if sliding:
        config = MistralConfig(**{**config.to_dict(), "sliding_window": WINDOW, "model_type": "mistral"})
        config._attn_implementation = attention
    model = tiny_model(config)
    assert model.config._attn_implementation == attention
    tokens = torch.randint(0, VOCABULARY, (2, 14), generator=torch.Generator().manual_seed(3))
    seen = torch.ones_like(tokens)
    seen[1, :2] = 0
    masks = (seen[:, :9], seen) if padded else (None, None)
    with torch.inference_mode():
        cache = model(tokens[:, :9], attention_mask=masks[0], use_cache=True).past_key_values
        logits = model(tokens[:, 9:], attention_mask=masks[1], past_key_values=cache).logits
    assert torch.isfinite(logits).all()
    return logits
