"""Generation with prefix reuse: the text never changes, pages never leak, whatever is cached, batched or cut short."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import PAGE_TOKENS, VOCABULARY, Wrap, family_model, prompt_of, push_out, tiny_config, tiny_model

from kvhoist.adapters.transformers import PREFIX_ATTENTION, CachedModel, Sampling
from kvhoist.config import CacheConfig
from kvhoist.demo.oracles import greedy
from kvhoist.errors import ClosedError, ConfigError, TokenError
from kvhoist.storage import MemoryStore

NINE = Sampling(max_new_tokens=9)


def _expected(model: Any, prompt: list[int], num_new: int = 9) -> tuple[int, ...]:
    return greedy(model, prompt, num_new).tokens


def test_the_text_is_the_same_cold_warm_and_in_the_next_turn(any_model: Any, wrap: Wrap) -> None:
    cached = wrap(any_model)
    prompt = prompt_of(30)
    for num_cached in (0, 28):
        generation = cached.generate(prompt, NINE)
        assert generation.tokens == _expected(any_model, prompt)
        assert generation.report.device_tokens == num_cached
    longer = [*prompt, *generation.tokens, *prompt_of(5, seed=1)]
    generation = cached.generate(longer, NINE)
    assert generation.tokens == _expected(any_model, longer)
    # 30 prompt tokens and all generated ones but the last, whose KV nobody computed
    assert generation.report.device_tokens == (30 + 8) // PAGE_TOKENS * PAGE_TOKENS


def test_the_last_prompt_token_is_computed_even_when_every_page_is_cached(llama: Any, wrap: Wrap) -> None:
    cached = wrap(llama)
    prompt = prompt_of(32)
    cached.generate(prompt, NINE)
    report = cached.generate(prompt, NINE).report
    assert (report.cached_tokens, report.recomputed_tokens) == (28, 4)
    assert cached.generate(prompt[:1], NINE).report.recomputed_tokens == 1


def test_a_report_adds_up(llama: Any, wrap: Wrap) -> None:
    cached = wrap(llama, store=MemoryStore("16MiB"))
    prompt = prompt_of(41)
    for pushed in ((), ("device",), ("device", "host")):
        if pushed:
            push_out(cached, *pushed)
        report = cached.generate(prompt, NINE).report
        parts = (report.device_tokens, report.host_tokens, report.storage_tokens, report.recomputed_tokens)
        assert sum(parts) == report.prompt_tokens == 41
        assert 0 < report.ttft_seconds < 60
        assert report.tokens_per_second > 0
        assert report.new_tokens == 9
    assert report.storage_tokens == 40


def test_a_prompt_longer_than_the_pool_is_answered_and_cached_as_far_as_there_is_room(
    any_model: Any, wrap: Wrap
) -> None:
    cached = wrap(any_model, device_tokens=24)
    prompt = prompt_of(70)
    for num_cached in (0, 24):
        generation = cached.generate(prompt, NINE)
        assert generation.tokens == _expected(any_model, prompt)
        assert generation.report.cached_tokens == num_cached
        cached.cache.flush()


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=5), data=st.data())
def test_a_batch_gives_each_prompt_what_it_gives_alone(
    any_model: Any, lengths: list[tuple[int, int]], data: st.DataObject
) -> None:
    with CachedModel(any_model, page_tokens=PAGE_TOKENS, device_tokens=400, host_bytes="2MiB") as cached:
        prompts = [prompt_of(60, seed=seed)[:length] for length, seed in lengths]
        for prompt in data.draw(st.lists(st.sampled_from(prompts), max_size=3)):
            cached.generate(prompt, Sampling(max_new_tokens=1))
        together = cached.generate_batch(prompts, NINE)
        assert [g.tokens for g in together] == [_expected(any_model, prompt) for prompt in prompts]
        cached.cache.flush()
        cached.cache.audit()


@pytest.mark.parametrize("attention", ["eager", "sdpa", PREFIX_ATTENTION])
def test_padding_is_invisible_in_every_attention_implementation(wrap: Wrap, attention: str) -> None:
    model = tiny_model(tiny_config("llama", attn_implementation=attention))
    cached = wrap(model)
    prompts = [prompt_of(50), prompt_of(3, seed=1), prompt_of(17, seed=2)]
    cached.generate(prompts[0], NINE)
    assert [g.tokens for g in cached.generate_batch(prompts, NINE)] == [_expected(model, p) for p in prompts]


def test_learned_positions_count_a_rows_own_tokens(wrap: Wrap) -> None:
    model = family_model("gpt2")
    cached = wrap(model)
    prompts = [prompt_of(50), prompt_of(3, seed=1), prompt_of(17, seed=2)]
    cached.generate(prompts[0], NINE)
    assert [g.tokens for g in cached.generate_batch(prompts, NINE)] == [_expected(model, p) for p in prompts]


def test_rows_of_a_batch_stop_each_at_its_own_end(llama: Any, wrap: Wrap) -> None:
    cached = wrap(llama)
    prompts = [prompt_of(20), prompt_of(11, seed=1)]
    first, second = (_expected(llama, prompt) for prompt in prompts)
    samplings = [Sampling(max_new_tokens=9, stop_tokens=(first[2],)), Sampling(max_new_tokens=4)]
    stopped, cut = cached.generate_batch(prompts, samplings)
    length = first.index(first[2]) + 1
    assert (stopped.tokens, stopped.finish_reason) == (first[:length], "stop")
    assert (cut.tokens, cut.finish_reason) == (second[:4], "length")
    assert cached.generate(prompts[1], NINE).tokens == second


def test_sampled_tokens_depend_on_the_seed_alone(llama: Any, wrap: Wrap) -> None:
    cached = wrap(llama)
    prompt = prompt_of(30)
    hot = Sampling(max_new_tokens=12, temperature=1.5, top_k=50, top_p=0.95, seed=5)
    cold = cached.generate(prompt, hot).tokens
    assert cached.generate(prompt, hot).tokens == cold
    assert cached.generate_batch([prompt_of(44, seed=1), prompt], hot)[1].tokens == cold
    others = {cached.generate(prompt, Sampling(12, 1.5, 50, 0.95, seed)).tokens for seed in range(6, 12)}
    assert len({cold, *others}) > 3


def test_interleaved_streams_do_not_touch_each_other(any_model: Any, wrap: Wrap) -> None:
    cached = wrap(any_model, device_tokens=64)
    prompts = [prompt_of(30), [*prompt_of(30)[:16], *prompt_of(14, seed=1)], prompt_of(25, seed=2)]
    streams = [cached.stream(prompt, NINE) for prompt in prompts]
    for _ in range(9):
        for stream in streams:
            next(stream)
    for stream, prompt in zip(streams, prompts, strict=True):
        assert next(stream, None) is None
        assert stream.result.tokens == _expected(any_model, prompt)


def test_several_threads_generate_at_once(llama: Any, wrap: Wrap) -> None:
    cached = wrap(llama, device_tokens=64, host_bytes="256KiB", store=MemoryStore("16MiB"))
    prompts = [[*prompt_of(20)[: 5 * i], *prompt_of(30, seed=i)] for i in range(4)]
    expected = [_expected(llama, prompt) for prompt in prompts]
    wrong: list[int] = []

    def talk(index: int) -> None:
        for turn in range(6):
            which = (index + turn) % len(prompts)
            if cached.generate(prompts[which], NINE).tokens != expected[which]:
                wrong.append(which)

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
def test_conversations_that_outgrow_device_and_host_stay_right(
    llama: Any, wrap: Wrap, tmp_path: Path, write_policy: str
) -> None:
    page_bytes = wrap(llama).shape.group.page_bytes
    cached = wrap(
        llama,
        device_tokens=96,
        host_bytes=32 * max(page_bytes, 4096),
        store=f"file:{tmp_path / 'kv'}?capacity=64MiB",
        cache_config=CacheConfig(write_policy=write_policy),
    )
    talks = [prompt_of(60, seed=i) for i in range(3)]
    seen = dict.fromkeys(("device_tokens", "host_tokens", "storage_tokens"), 0)
    for turn in range(4):
        for i, talk in enumerate(talks):
            generation = cached.generate(talk, NINE)
            assert generation.tokens == _expected(llama, talk)
            talk += [*generation.tokens, *prompt_of(4, seed=10 * turn + i)]
            for name in seen:
                seen[name] += getattr(generation.report, name)
            cached.cache.flush()
            cached.cache.audit()
    assert seen["host_tokens"] + seen["storage_tokens"] > 0
    if write_policy == "write_through":
        assert seen["storage_tokens"] > 0


def test_tenants_salts_and_weights_do_not_share_pages(llama: Any, wrap: Wrap) -> None:
    store = MemoryStore("16MiB")
    prompt = prompt_of(30)
    wrap(llama, store=store, tenant="one").generate(prompt, NINE, salt=b"a")
    assert wrap(llama, store=store, tenant="two").generate(prompt, NINE, salt=b"a").report.cached_tokens == 0
    other = tiny_model(tiny_config("llama"))
    other.get_input_embeddings().weight.data[0, 0] += 1
    assert wrap(other, store=store, tenant="one").generate(prompt, NINE, salt=b"a").report.cached_tokens == 0
    same = wrap(llama, store=store, tenant="one")
    assert same.generate(prompt, NINE, salt=b"b").report.cached_tokens == 0
    assert same.generate(prompt, NINE, salt=b"a").report.cached_tokens == 28


def test_switched_off_it_computes_as_if_it_were_not_there(
    llama: Any, wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVHOIST_DISABLE", "1")
    cached = wrap(llama)
    prompt = prompt_of(30)
    for _ in range(2):
        generation = cached.generate(prompt, NINE)
        assert generation.tokens == _expected(llama, prompt)
        assert (generation.report.cached_tokens, generation.report.stored_pages) == (0, 0)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], ConfigError),
        ([-1], TokenError),
        ([5, VOCABULARY], TokenError),
        (prompt_of(1020), ConfigError),
        ("text without a tokenizer", ConfigError),
    ],
)
def test_prompts_that_cannot_be_are_refused(llama: Any, wrap: Wrap, prompt: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        wrap(llama).generate(prompt, NINE)


def test_what_is_not_there_is_said(llama: Any, wrap: Wrap) -> None:
    cached = wrap(llama)
    with pytest.raises(ConfigError, match="not ended"):
        _ = cached.stream(prompt_of(5), NINE).result
    with pytest.raises(ConfigError, match="pair up"):
        cached.generate_batch([prompt_of(5)], [NINE, NINE])
    cached.close()
    with pytest.raises(ClosedError):
        cached.generate(prompt_of(5), NINE)
    cached.close()
