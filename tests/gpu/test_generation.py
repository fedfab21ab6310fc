"""The transformers adapter on a GPU: what is loaded is what was computed, to the bit, from every tier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, PAGE_TOKENS, prompt_of, push_out, tiny_config, tiny_model, traced

from kvhoist.adapters.transformers import CachedModel
from kvhoist.demo.oracles import KeptInMemory, first_difference

NUM_NEW = 9


def turn(cached: CachedModel, kept: KeptInMemory, prompt: list[int], tier: str) -> list[int]:
    """Answer `prompt`, whose prefix is expected from `tier`, and compare with a prefix kept on the device."""
    generation, trace = traced(cached, prompt, NUM_NEW)
    report = generation.report
    tokens = {"device": report.device_tokens, "host": report.host_tokens, "storage": report.storage_tokens}
    assert sum(tokens.values()) == tokens.get(tier, 0) == report.cached_tokens
    assert (report.cached_tokens > 0) == (tier != "nowhere")
    assert first_difference(trace, kept.replay(prompt, report.cached_tokens, NUM_NEW)) is None
    return list(generation.tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tier_brings_back_what_was_computed(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(family), dtype=dtype).to("cuda")
    kept = KeptInMemory(model, PAGE_TOKENS)
    options = {"page_tokens": PAGE_TOKENS, "device_tokens": 64, "host_bytes": "1MiB", "weights_id": "test"}
    store = f"file:{tmp_path / 'kv'}?capacity=64MiB"
    with CachedModel(model, None, store=store, **options) as cached:
        prompt = prompt_of(33)
        answer = turn(cached, kept, prompt, "nowhere")
        answered = [*prompt, *answer, *prompt_of(6, seed=2)]
        turn(cached, kept, answered, "device")
        push_out(cached)
        turn(cached, kept, answered, "host")
        push_out(cached, "device", "host")
        turn(cached, kept, answered, "storage")
        assert cached.cache.stats().num_mismatches == 0
    with CachedModel(model, None, store=store, **options) as again:
        turn(again, kept, answered, "storage")


def test_many_turns_under_eviction_stay_equal_to_the_bit() -> None:
    model = tiny_model(tiny_config("llama")).to("cuda")
    kept = KeptInMemory(model, PAGE_TOKENS)
    options = {"page_tokens": PAGE_TOKENS, "device_tokens": 96, "host_bytes": "1MiB", "weights_id": "test"}
    with CachedModel(model, None, **options) as cached:
        chats = [prompt_of(20, seed=seed) for seed in range(6)]
        from_host = 0
        for _ in range(5):
            for i, chat in enumerate(chats):
                generation, trace = traced(cached, chat, 4)
                assert first_difference(trace, kept.replay(chat, generation.report.cached_tokens, 4)) is None
                from_host += generation.report.host_tokens
                chats[i] = [*chat, *generation.tokens, *prompt_of(3, seed=100 + i)]
        assert from_host > 100
        cached.cache.audit()
