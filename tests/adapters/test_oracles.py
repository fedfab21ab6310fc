"""The end-to-end oracles: equal to the bit to a prefix kept in memory, from every tier, and a wrong byte is seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import PAGE_TOKENS, Wrap, prompt_of, push_out, traced

from kvhoist.adapters.transformers import CachedModel
from kvhoist.demo.oracles import KeptInMemory, first_difference, greedy, same_bits
from kvhoist.messages import StorageKey
from kvhoist.storage import MemoryStore, Sealer
from kvhoist.storage.base import Buffer

NUM_NEW = 9


class LyingStore(MemoryStore):
    """Flips one bit of every page and seals it anew, so that verification cannot notice: the oracles must."""

    lies = True

    def get(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[bytes | None]:
        headers = super().get(keys, blobs)
        if not self.lies:
            return headers
        for blob in blobs:
            blob[len(blob) // 2 + 3] ^= 0x40  # the exponent of a float32
        return [h and Sealer(None).seal(key, blob) for h, key, blob in zip(headers, keys, blobs, strict=True)]


def _turns(cached: CachedModel, kept: KeptInMemory, prompt: list[int], tier: str) -> None:
    """Answer `prompt`, whose prefix is expected from `tier`, and compare with both oracles."""
    generation, trace = traced(cached, prompt, NUM_NEW)
    report = generation.report
    tokens = {"device": report.device_tokens, "host": report.host_tokens, "storage": report.storage_tokens}
    assert sum(tokens.values()) == tokens.get(tier, 0) == report.cached_tokens
    assert (report.cached_tokens > 0) == (tier != "nowhere")
    replayed = kept.replay(prompt, report.cached_tokens, NUM_NEW)
    assert first_difference(trace, replayed) is None
    assert greedy(cached.model, prompt, NUM_NEW).tokens == generation.tokens


def test_logits_and_kv_equal_a_prefix_kept_in_memory_from_every_tier(
    any_model: Any, wrap: Wrap, tmp_path: Path
) -> None:
    store = f"file:{tmp_path / 'kv'}?capacity=64MiB"
    cached = wrap(any_model, store=store, device_tokens=64)
    kept = KeptInMemory(any_model, PAGE_TOKENS)
    prompt = prompt_of(33)
    _turns(cached, kept, prompt, "nowhere")
    answered = [*prompt, *greedy(any_model, prompt, NUM_NEW).tokens, *prompt_of(6, seed=2)]
    _turns(cached, kept, answered, "device")
    push_out(cached)
    _turns(cached, kept, answered, "host")
    push_out(cached, "device", "host")
    _turns(cached, kept, answered, "storage")
    cached.close()
    again = wrap(any_model, store=store, device_tokens=64)
    _turns(again, kept, answered, "storage")


def test_bfloat16_is_equal_to_the_bit_too(llama: Any, wrap: Wrap) -> None:
    model = type(llama)(llama.config)
    model.load_state_dict(llama.state_dict())
    cached = wrap(model.to(torch.bfloat16).eval())
    kept = KeptInMemory(cached.model, PAGE_TOKENS)
    for seed in (0, 0, 1):
        prompt = prompt_of(21, seed=seed)
        generation, trace = traced(cached, prompt, NUM_NEW)
        assert first_difference(trace, kept.replay(prompt, generation.report.cached_tokens, NUM_NEW)) is None


def test_a_flipped_bit_in_storage_is_seen_by_the_oracle_when_verification_cannot(any_model: Any, wrap: Wrap) -> None:
    store = LyingStore("16MiB")
    kept = KeptInMemory(any_model, PAGE_TOKENS)
    prompt = prompt_of(33)
    _turns(wrap(any_model, store=store), kept, prompt, "nowhere")
    for lies in (True, False):
        store.lies = lies
        fresh = wrap(any_model, store=store, weights_id=None)
        generation, trace = traced(fresh, prompt, NUM_NEW)
        assert generation.report.storage_tokens == 32
        difference = first_difference(trace, kept.replay(prompt, 32, NUM_NEW))
        assert (difference is not None) == lies
        logits = zip(trace.logits, kept.replay(prompt, 32, NUM_NEW).logits, strict=True)
        assert all(same_bits(a, b) for a, b in logits) != lies


def test_a_flipped_bit_in_the_host_tier_is_seen_by_the_oracle(llama: Any, wrap: Wrap) -> None:
    cached = wrap(llama, device_tokens=64)
    kept = KeptInMemory(llama, PAGE_TOKENS)
    prompt = prompt_of(33)
    _turns(cached, kept, prompt, "nowhere")
    push_out(cached)
    cached.cache._binding.arena.buffer[3::64] ^= 0x40
    generation, trace = traced(cached, prompt, NUM_NEW)
    assert generation.report.host_tokens > 0
    assert first_difference(trace, kept.replay(prompt, generation.report.cached_tokens, NUM_NEW)) is not None


def test_a_corrupt_stored_page_is_recomputed_not_served(llama: Any, wrap: Wrap, tmp_path: Path) -> None:
    store = f"file:{tmp_path}/kv?capacity=64MiB"
    prompt = prompt_of(33)
    first = wrap(llama, store=store)
    expected = traced(first, prompt, NUM_NEW)[0].tokens
    first.close()
    for segment in (tmp_path / "kv").rglob("*"):
        if segment.is_file() and segment.stat().st_size > 1 << 16:
            data = bytearray(segment.read_bytes())
            data[len(data) // 2 :: 512] = bytes(b ^ 0x55 for b in data[len(data) // 2 :: 512])
            data[8192 + 4096 :: 512] = bytes(b ^ 0x55 for b in data[8192 + 4096 :: 512])
            segment.write_bytes(data)
    generation = traced(wrap(llama, store=store), prompt, NUM_NEW)[0]
    assert generation.tokens == expected
    assert generation.report.storage_tokens < 32


def test_the_models_of_these_tests_depend_on_their_kv(any_model: Any) -> None:
    """Else no oracle could see anything: other first tokens must move the last token's logits."""
    one, other = prompt_of(20), [*prompt_of(10, seed=7), *prompt_of(20)[10:]]
    a, b = (greedy(any_model, prompt, 1).logits[0] for prompt in (one, other))
    assert (a - b).abs().max() > 0.05 * a.abs().max()


@pytest.mark.parametrize("same", [True, False])
def test_a_difference_is_named(llama: Any, same: bool) -> None:
    prompt = prompt_of(9)
    one, other = greedy(llama, prompt, 3), greedy(llama, prompt, 3)
    if not same:
        with torch.inference_mode():
            other.kv[1][1][0, 0, 4, 2] += 1
    assert first_difference(one, other) == (None if same else "v of layer 1")
    assert (one.digest() == other.digest()) == same
