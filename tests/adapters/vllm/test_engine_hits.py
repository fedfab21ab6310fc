"""vLLM itself, on a real model: what comes from host memory or disk is, to the bit, what stays on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_models import PAGE_BYTES, PAGE_TOKENS, Talk, engine, prompt_of, talk_of, write_tiny_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("engine") / "llama")


@pytest.fixture(scope="module")
def talk(llama: Path) -> Talk:
    found = talk_of(llama)
    assert [answer.cached_tokens for answer in found.answers] == [found.hit_tokens(turn) for turn in range(3)]
    assert all(found.hit_tokens(turn) % PAGE_TOKENS == 0 for turn in range(3))
    return found


def _play(opened: Any, talk: Talk, turns: range) -> None:
    for turn in turns:
        assert opened.ask(talk.prompts[turn], Talk.NEW_TOKENS) == talk.answers[turn]
        opened.forget_device()


def test_turns_from_the_host_and_after_a_restart_from_disk_equal_those_kept_on_the_device(
    llama: Path, talk: Talk, tmp_path: Path
) -> None:
    settings = {"host_bytes": "64MiB", "storage": f"file:{tmp_path / 'kv'}"}
    with engine(llama, settings) as opened:
        _play(opened, talk, range(2))
        assert opened.hits() == {"host": talk.hit_tokens(1), "storage": 0}
    with engine(llama, settings) as opened:
        _play(opened, talk, range(2, 3))
        assert opened.hits() == {"host": 0, "storage": talk.hit_tokens(2)}
        assert opened.counter("vllm:prompt_tokens_cached_by_source", source="disk") == talk.hit_tokens(2)


def test_turns_in_bfloat16_equal_those_kept_on_the_device(llama: Path) -> None:
    talk = talk_of(llama, 2, dtype="bfloat16")
    with engine(llama, {"host_bytes": "64MiB"}, dtype="bfloat16") as opened:
        _play(opened, talk, range(2))
        assert opened.hits()["host"] == talk.hit_tokens(1)


def test_layerwise_loads_give_the_same_bits(llama: Path, talk: Talk) -> None:
    with engine(llama, {"host_bytes": "64MiB", "layerwise": True}) as opened:
        _play(opened, talk, range(3))
        assert opened.hits()["host"] == talk.hit_tokens(1) + talk.hit_tokens(2)


def test_a_salt_separates_and_counters_are_exact(llama: Path, tmp_path: Path) -> None:
    pages, rest = 5, 40
    prompt = prompt_of(pages * PAGE_TOKENS + rest)
    settings = {"host_bytes": "64MiB", "storage": f"file:{tmp_path / 'kv'}"}
    with engine(llama, settings) as opened:
        for salt in ("one", "two", "one"):
            opened.ask(prompt, 2, salt=salt)
            opened.forget_device()
        opened.ask(prompt_of(10, 9), 1)  # its step publishes what the last one counted
        counters = opened.plane.flights.counters
        count = lambda name, kind: opened.counter(f"vllm:kvhoist_{name}", kind=kind)  # noqa: E731
        assert opened.hits() == {"host": pages * PAGE_TOKENS, "storage": 0}
        for kind, num_pages in {"offload": 2 * pages, "persist": 2 * pages, "load": pages}.items():
            assert (count("pages", kind), count("failed_pages", kind)) == (num_pages, 0)
            assert count("bytes", kind) == num_pages * PAGE_BYTES
            assert count("jobs", kind) == counters[kind].jobs > 0
            assert count("seconds", kind) > 0
        assert count("pages", "prefetch") == 0
        assert opened.counter("vllm:kvhoist_host_ready_pages") == 2 * pages
        assert opened.counter("vllm:kvhoist_open_jobs") == 0
        misses = opened.counter("vllm:kvhoist_miss_tokens", reason="never_seen")
        assert misses == 2 * pages * PAGE_TOKENS + 2 * 32


def test_generated_tokens_are_found_under_speculation_which_offers_confirmed_ones_only(llama: Path) -> None:
    """The prompt repeats itself, so that drafts are made; the random model refuses most of them."""
    options = {
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        }
    }  # fmt: skip
    motif = prompt_of(50)
    prompt = [*motif, *motif, *motif, *prompt_of(42, 1)]
    question = prompt_of(60, 2)
    new_tokens = 129
    with engine(llama, num_gpu_blocks_override=400, **options) as plain:
        first = plain.ask(prompt, new_tokens)
        second = plain.ask([*prompt, *first.tokens, *question])
        drafted = plain.counter("vllm:spec_decode_num_draft_tokens")
        accepted = plain.counter("vllm:spec_decode_num_accepted_tokens")
    assert drafted > accepted
    with engine(llama, {"host_bytes": "64MiB"}, **options) as opened:
        assert opened.ask(prompt, new_tokens).tokens == first.tokens
        opened.forget_device()
        again = opened.ask([*prompt, *first.tokens, *question])
        assert again.cached_tokens == second.cached_tokens == len(prompt) + new_tokens - 1
        assert again == second
