"""The transformers adapter on a GPU: what is loaded is what was computed, to the bit, from every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, PAGE_TOKENS, prompt_of, push_out, tiny_config, tiny_model, traced

from kvhoist.adapters.transformers import CachedModel, Sampling
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


def deep_llama() -> Any:
    return tiny_model(tiny_config("llama", num_hidden_layers=6)).to("cuda")


def test_layers_that_arrive_while_the_forward_runs_change_no_bit() -> None:
    options = {"page_tokens": PAGE_TOKENS, "device_tokens": 2048, "host_bytes": "16MiB", "weights_id": "test"}
    with CachedModel(deep_llama(), None, **options) as cached:
        prompt = prompt_of(900)
        cached.generate(prompt, Sampling(max_new_tokens=1))
        _, kept = traced(cached, prompt, NUM_NEW)
        for layerwise in (True, False, True):
            cached.prefixes.layerwise = layerwise
            push_out(cached)
            for tensors in cached.pool.tensors.values():
                for tensor in tensors:
                    tensor.fill_(7)
            generation, trace = traced(cached, prompt, NUM_NEW)
            assert generation.report.host_tokens == 896
            assert first_difference(trace, kept) is None


def test_a_batch_from_the_host_tier_says_what_it_says_from_the_device() -> None:
    options = {"page_tokens": PAGE_TOKENS, "device_tokens": 512, "host_bytes": "4MiB", "weights_id": "test"}
    few = Sampling(max_new_tokens=NUM_NEW)
    with CachedModel(deep_llama(), None, **options) as cached:
        prompts = [prompt_of(90), prompt_of(33, seed=1), prompt_of(3, seed=2)]
        cached.generate_batch(prompts, few)
        on_device = cached.generate_batch(prompts, few)
        push_out(cached)
        from_host = cached.generate_batch(prompts, few)
        assert [g.report.host_tokens for g in from_host] == [88, 32, 0] == [g.report.device_tokens for g in on_device]
        assert [g.tokens for g in from_host] == [g.tokens for g in on_device]


def test_a_load_that_fails_under_the_forward_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep_llama()
    kept = KeptInMemory(model, PAGE_TOKENS)
    options = {"page_tokens": PAGE_TOKENS, "device_tokens": 512, "host_bytes": "4MiB", "weights_id": "test"}
    with CachedModel(model, None, **options) as cached:
        prompt = prompt_of(90)
        turn(cached, kept, prompt, "nowhere")
        push_out(cached)
        copies = cached.cache._binding.mover._copies
        assert copies is not None
        load = copies.load

        def all_but_two_pages(*arguments: Any) -> Any:
            finish, pages = load(*arguments), range(2, arguments[0].num_pages)
            return lambda: finish()._replace(failed_pages=tuple(pages), error="planted")

        with monkeypatch.context() as patch:
            patch.setattr(copies, "load", all_but_two_pages)
            generation, trace = traced(cached, prompt, NUM_NEW)
        assert (generation.report.host_tokens, generation.report.recomputed_tokens) == (8, 82)
        assert first_difference(trace, kept.replay(prompt, 8, NUM_NEW)) is None
        assert cached.cache.flush()
        cached.cache.audit()
