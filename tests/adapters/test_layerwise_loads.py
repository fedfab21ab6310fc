"""Loads that a forward waits for layer by layer: each layer is read when it has arrived and not before, and a load that
fails on the way costs a recompute, never a wrong bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import PAGE_TOKENS, Wrap, prompt_of, push_out, tiny_config, tiny_model, traced

from kvhoist.adapters.transformers import CachedModel, Sampling
from kvhoist.config import CacheConfig
from kvhoist.copy.reference import BoundPlan
from kvhoist.demo.oracles import greedy
from kvhoist.lease import Lease
from kvhoist.storage import MemoryStore

NUM_LAYERS = 4
NUM_NEW = 5
DEADLINE_S = 20
FEW = Sampling(max_new_tokens=NUM_NEW)

CopyLayer = Callable[[int, Callable[..., int], Any, Any], int]
"""(layer, real copy, host pages, device pages) -> bytes copied."""


def deep(family: str = "llama") -> Any:
    return tiny_model(tiny_config(family, num_hidden_layers=NUM_LAYERS))


def on_loads(monkeypatch: pytest.MonkeyPatch, act: CopyLayer) -> None:
    """Have `act` do the copies of every load, which are a layer each here."""
    real = BoundPlan.copy

    def copy(plan: BoundPlan, src: Any, dst: Any) -> int:
        if plan.plan.dst.name != "the transformers pool":
            return real(plan, src, dst)
        (layer,) = plan.plan.layers
        return act(layer, lambda *pages: real(plan, *pages), src, dst)

    monkeypatch.setattr(BoundPlan, "copy", copy)


def scribble(cached: CachedModel) -> None:
    """Leave nothing right in the pool, so that what is read too early is wrong."""
    for tensors in cached.pool.tensors.values():
        for tensor in tensors:
            tensor.fill_(7)


def primed(cached: CachedModel, prompt: list[int], *tiers: str) -> None:
    """Have the prompt's pages in the tier below `tiers` only."""
    cached.generate(prompt, Sampling(max_new_tokens=1))
    push_out(cached, *tiers)
    scribble(cached)


@pytest.mark.parametrize("tiers", [("device",), ("device", "host")], ids=["from host", "from storage"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_each_layer_is_read_as_soon_as_it_has_arrived_and_not_before(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch, family: str, tiers: tuple[str, ...]
) -> None:
    model = deep(family)
    cached, prompt = wrap(model, store=MemoryStore("16MiB")), prompt_of(30)
    primed(cached, prompt, *tiers)
    asked = [threading.Event() for _ in range(NUM_LAYERS)]
    events: list[tuple[str, int]] = []
    wait, gather = Lease.wait, cached.pool.gather

    def on_wait(lease: Lease, layer: int | None = None, **options: Any) -> None:
        if layer is not None:
            asked[layer].set()
        wait(lease, layer, **options)

    def on_gather(part: Any, layer: int, *rest: Any) -> None:
        asked[layer].set()  # too early, without a wait; the order below tells
        if ("read", layer) not in events:
            events.append(("read", layer))
        gather(part, layer, *rest)

    def arrive_when_asked(layer: int, real: Callable[..., int], src: Any, dst: Any) -> int:
        assert asked[layer].wait(DEADLINE_S), f"nobody asked for layer {layer} while the ones before had arrived"
        copied = real(src, dst)
        events.append(("arrived", layer))
        return copied

    monkeypatch.setattr(Lease, "wait", on_wait)
    monkeypatch.setattr(cached.pool, "gather", on_gather)
    on_loads(monkeypatch, arrive_when_asked)
    generation = cached.generate(prompt, FEW)
    assert events == [(what, layer) for layer in range(NUM_LAYERS) for what in ("arrived", "read")]
    assert generation.report.cached_tokens == 28
    assert generation.tokens == greedy(model, prompt, NUM_NEW).tokens


@pytest.mark.parametrize("failing_layer", range(NUM_LAYERS))
def test_a_load_that_breaks_off_is_recomputed_to_the_same_answer(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch, failing_layer: int
) -> None:
    model = deep()
    cached, prompt = wrap(model), prompt_of(30)
    primed(cached, prompt)
    read: list[int] = []
    gather = cached.pool.gather

    def on_gather(part: Any, layer: int, *rest: Any) -> None:
        read.append(layer)
        gather(part, layer, *rest)

    def fail_in_the_middle(layer: int, real: Callable[..., int], src: Any, dst: Any) -> int:
        if layer == failing_layer:
            raise RuntimeError("planted")
        return real(src, dst)

    with monkeypatch.context() as patch:
        patch.setattr(cached.pool, "gather", on_gather)
        on_loads(patch, fail_in_the_middle)
        generation = cached.generate(prompt, FEW)
    assert set(read) <= set(range(failing_layer))
    assert generation.tokens == greedy(model, prompt, NUM_NEW).tokens
    assert (generation.report.recomputed_tokens, generation.report.host_tokens) == (30, 0)
    assert_all_is_right(cached, model, prompt)


@pytest.mark.parametrize("verify", [False, True], ids=["found after the forward", "debug_verify"])
def test_pages_that_turn_out_wrong_end_the_prefix_and_what_was_computed_over_them_is_kept_by_no_tier(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    model = deep()
    cached, prompt = wrap(model, cache_config=CacheConfig(debug_verify=verify)), prompt_of(30)
    primed(cached, prompt)
    copies = cached.cache._binding.mover._copies
    assert copies is not None
    load, computed = copies.load, threading.Event()
    forwards = count_forwards(cached, after=computed.set)

    def only_two_pages(layer: int, real: Callable[..., int], src: Any, dst: Any) -> int:
        return real(src[:2], dst[:2]) if layer else real(src, dst)

    def say_so_at_the_end(*arguments: Any) -> Any:
        finish, pages = load(*arguments), range(2, arguments[0].num_pages)

        def fail_after_the_forward() -> Any:
            assert computed.wait(DEADLINE_S)
            return finish()._replace(failed_pages=tuple(pages), error="planted")

        return fail_after_the_forward

    with monkeypatch.context() as patch:
        on_loads(patch, only_two_pages)
        if not verify:
            patch.setattr(copies, "load", say_so_at_the_end)
        generation = cached.generate(prompt, Sampling(max_new_tokens=1))
    assert len(forwards) == 2  # the one over wrong pages, or broken off at its first layer; and the one that counts
    assert generation.tokens == greedy(model, prompt, 1).tokens
    assert (generation.report.host_tokens, generation.report.recomputed_tokens) == (2 * PAGE_TOKENS, 22)
    assert_all_is_right(cached, model, prompt)


def test_a_load_that_comes_too_late_is_recomputed(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    model, gate = deep(), threading.Event()
    cached, prompt = wrap(model, cache_config=CacheConfig(acquire_timeout_s=0.05)), prompt_of(30)
    primed(cached, prompt)

    def hold(layer: int, real: Callable[..., int], src: Any, dst: Any) -> int:
        assert layer == 0 or gate.wait(DEADLINE_S)
        return real(src, dst)

    with monkeypatch.context() as patch:
        on_loads(patch, hold)
        generation = cached.generate(prompt, FEW)
        gate.set()
        assert cached.cache.flush()
    assert generation.tokens == greedy(model, prompt, NUM_NEW).tokens
    assert generation.report.recomputed_tokens == 30
    assert_all_is_right(cached, model, prompt)


def test_a_row_whose_load_fails_leaves_the_other_rows_their_prefixes(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deep()
    cached, prompts = wrap(model), [prompt_of(30), prompt_of(41, seed=1), prompt_of(9, seed=2)]
    for prompt in prompts:
        primed(cached, prompt)

    def fail_the_long_one(layer: int, real: Callable[..., int], src: Any, dst: Any) -> int:
        if len(src) == 10 and layer == 2:
            raise RuntimeError("planted")
        return real(src, dst)

    with monkeypatch.context() as patch:
        on_loads(patch, fail_the_long_one)
        generations = cached.generate_batch(prompts, FEW)
    assert [g.report.host_tokens for g in generations] == [28, 0, 8]
    assert [g.tokens for g in generations] == [greedy(model, prompt, NUM_NEW).tokens for prompt in prompts]
    for prompt in prompts:
        assert_all_is_right(cached, model, prompt)


def test_a_layer_that_the_model_never_asks_for_is_filled_after_the_forward(wrap: Wrap) -> None:
    cached, prompt = wrap(deep()), prompt_of(30)
    primed(cached, prompt)
    forward, seen = cached.forward, []

    class Skipping:
        model, shape = forward.model, forward.shape

        def __call__(self, tokens: torch.Tensor, cache: Any, *rest: Any) -> torch.Tensor:
            seen.append(cache.layers[1])
            for layer in (cache.layers[0], *cache.layers[2:]):
                layer.update(*(torch.ones(1, part.num_heads, tokens.shape[1], part.head_dim) for part in shape.parts))
            return torch.zeros(1, 8)

    shape = cached.shape
    cached.forward = Skipping()  # type: ignore[assignment]
    cached.generate(prompt, Sampling(max_new_tokens=1))
    kept = greedy(cached.model, prompt, 1).kv[1]
    for part, expected in zip(shape.parts, kept, strict=True):
        torch.testing.assert_close(seen[0].buffers[part.attribute][:, :, :28], expected[:, :, :28])


def test_without_layerwise_a_prefix_has_arrived_before_the_forward(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep()
    cached, prompt = wrap(model, layerwise=False), prompt_of(30)
    primed(cached, prompt)
    arrived: list[int] = []
    forwards = count_forwards(cached, lambda: list(arrived))

    def note(layer: int, real: Callable[..., int], src: Any, dst: Any) -> int:
        arrived.append(layer)
        return real(src, dst)

    on_loads(monkeypatch, note)
    assert cached.generate(prompt, FEW).tokens == greedy(model, prompt, NUM_NEW).tokens
    assert forwards[0] == list(range(NUM_LAYERS))


def count_forwards(
    cached: CachedModel, before: Callable[[], object] = lambda: None, after: Callable[[], object] = lambda: None
) -> list[object]:
    """Return the list that gets what `before` says before each forward; call `after` when one has returned."""
    forward, seen = cached.forward, []

    class Counting:
        model, shape = forward.model, forward.shape

        def __call__(self, *arguments: Any) -> torch.Tensor:
            seen.append(before())
            logits = forward(*arguments)
            after()
            return logits

    cached.forward = Counting()  # type: ignore[assignment]
    return seen


def assert_all_is_right(cached: CachedModel, model: Any, prompt: list[int]) -> None:
    """No page is lost, and what the tiers hold of the prompt is what computing it gives: from the device, from host."""
    assert cached.cache.flush()
    cached.cache.audit()
    for tier in ("device", "host"):
        if tier == "host":
            push_out(cached)
            scribble(cached)
        generation, trace = traced(cached, prompt, NUM_NEW)
        assert generation.report.cached_tokens == (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
        expected = greedy(model, prompt, NUM_NEW)
        assert generation.tokens == expected.tokens
        torch.testing.assert_close(trace.kv, expected.kv, rtol=1e-3, atol=1e-3)  # computed in other chunks, perhaps
