"""Tokens are chosen as asked, and text comes out whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvhoist.adapters.transformers import Sampling
from kvhoist.adapters.transformers.sampling import Sampler
from kvhoist.adapters.transformers.text import TextStream
from kvhoist.errors import ConfigError

_LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -5.0])


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Sampling(**fields)


def test_greedy_and_top_1_take_the_likeliest() -> None:
    assert Sampler(Sampling()).choose(_LOGITS) == 1
    assert {Sampler(Sampling(temperature=2.0, top_k=1, seed=s)).choose(_LOGITS) for s in range(20)} == {1}


@given(top_k=st.integers(1, 9), seed=st.integers(0, 1000))
def test_top_k_keeps_the_k_likeliest(top_k: int, seed: int) -> None:
    assert Sampler(Sampling(temperature=9.0, top_k=top_k, seed=seed)).choose(_LOGITS) in [1, 3, 2, 0, 4][:top_k]


@given(top_p=st.floats(0.01, 1.0), seed=st.integers(0, 1000))
def test_top_p_keeps_the_fewest_that_reach_p(top_p: float, seed: int) -> None:
    ordered, order = _LOGITS.softmax(0).sort(descending=True)
    needed = int((ordered.cumsum(0) - ordered < top_p).sum())
    chosen = Sampler(Sampling(temperature=1.0, top_p=top_p, seed=seed)).choose(_LOGITS)
    assert chosen in order[:needed].tolist()


def test_frequencies_follow_the_temperature() -> None:
    sampler = Sampler(Sampling(temperature=2.0, seed=3))
    counts = torch.bincount(torch.tensor([sampler.choose(_LOGITS) for _ in range(4000)]), minlength=5) / 4000
    assert torch.allclose(counts, (_LOGITS / 2).softmax(0), atol=0.03)


@given(text=st.text(max_size=30))
def test_pieces_join_to_the_whole_text_and_never_split_a_character(byte_tokenizer: Any, text: str) -> None:
    stream = TextStream(byte_tokenizer)
    tokens = byte_tokenizer(text)["input_ids"]
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.finish() == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces) or "\N{REPLACEMENT CHARACTER}" in text


def test_a_text_cut_inside_a_character_ends_as_the_tokenizer_decodes_it(byte_tokenizer: Any) -> None:
    tokens = byte_tokenizer("né")["input_ids"][:-1]
    stream = TextStream(byte_tokenizer)
    assert "".join(map(stream.push, tokens)) == "n"
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": "5"},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": True},
        {"temperature": "hot"},
        {"temperature": None},
        {"top_k": 1.5},
        {"top_p": "most"},
        {"seed": 1.5},
        {"seed": 1 << 70},
        {"stop_tokens": 5},
        {"stop_tokens": "ab"},
    ],
)
def test_sampling_of_a_wrong_type_is_refused_when_it_is_made(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(fields))} .*expected"):
        Sampling(**fields)


@pytest.mark.parametrize("fields", [{"temperature": 1e-320}, {"temperature": 1e-45}, {"top_p": 1e-300}])
def test_the_smallest_temperature_and_share_are_greedy(fields: dict[str, Any]) -> None:
    sampling = Sampling(**{"temperature": 1.0, "seed": 1, **fields})
    assert {Sampler(sampling).choose(_LOGITS) for _ in range(20)} == {1}
