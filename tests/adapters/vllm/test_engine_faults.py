"""vLLM itself, when things go wrong: a broken page is never used, a bad setting is one clear message."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm_harness_faults import corrupt_folder
from vllm_models import PAGE_TOKENS, Answer, Engine, engine, plain_answers, prompt_of, write_tiny_llama

from kvhoist.errors import ConfigError, HostMemoryError, KvhoistError, PolicyError

PROMPT = prompt_of(5 * PAGE_TOKENS + 1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("engine") / "llama")


@pytest.fixture(scope="module")
def computed_and_kept(llama: Path) -> tuple[Answer, Answer]:
    """What the prompt gives without a hit, and with its prefix kept on the device."""
    computed, kept = plain_answers(llama, [(PROMPT, 8), (PROMPT, 8)])
    assert (computed.cached_tokens, kept.cached_tokens) == (0, 5 * PAGE_TOKENS)
    return computed, kept


def _corrupt_host(opened: Engine, pages: Sequence[int]) -> None:
    """Flip bits in host pages, by the order in which they became ready."""
    for page in pages:
        memory = opened.worker_side.arena.page(page)
        for at in range(0, len(memory), 64):
            memory[at] ^= 0x40


def test_a_corrupted_host_page_changes_the_output_unless_debug_verify_has_it_recomputed(
    llama: Path, computed_and_kept: tuple[Answer, Answer]
) -> None:
    computed, kept = computed_and_kept
    with engine(llama, {"host_bytes": "16MiB"}) as opened:
        opened.ask(PROMPT)
        opened.forget_device()
        _corrupt_host(opened, range(5))
        wrong = opened.ask(PROMPT)
        assert wrong.cached_tokens == 5 * PAGE_TOKENS
        assert wrong.logprobs != kept.logprobs
    with engine(llama, {"host_bytes": "16MiB", "debug_verify": True}) as opened:
        opened.ask(PROMPT)
        opened.forget_device()
        _corrupt_host(opened, range(5))
        right = opened.ask(PROMPT)
        assert (right.tokens, right.logprobs) == (computed.tokens, computed.logprobs)
        opened.ask(prompt_of(10, 9), 1)
        assert opened.counter("vllm:kvhoist_mismatched_pages") == 5
        assert opened.counter("vllm:kvhoist_failed_pages", kind="load") == 5
        opened.forget_device()
        assert opened.ask(PROMPT) in (computed, kept)


def test_corrupted_pages_on_disk_are_misses_that_are_recomputed(
    llama: Path, computed_and_kept: tuple[Answer, Answer], tmp_path: Path
) -> None:
    settings = {"host_bytes": "16MiB", "storage": f"file:{tmp_path / 'kv'}"}
    with engine(llama, settings) as opened:
        opened.ask(PROMPT)
    assert corrupt_folder(tmp_path / "kv")
    with engine(llama, settings) as opened:
        assert opened.ask(PROMPT) == computed_and_kept[0]
        assert opened.hits() == {"host": 0, "storage": 0}


def test_another_model_on_the_folder_misses_and_says_so_once(llama: Path, tmp_path: Path) -> None:
    settings = {"host_bytes": "16MiB", "storage": f"file:{tmp_path / 'kv'}"}
    with engine(llama, settings) as opened:
        opened.ask(PROMPT)
    other = write_tiny_llama(tmp_path / "other", seed=2)
    (expected,) = plain_answers(other, [(PROMPT, 8)])
    with _kvhoist_log() as lines, engine(other, settings) as opened:
        assert opened.ask(PROMPT) == expected
        opened.forget_device()
        opened.ask(PROMPT)
        assert opened.hits() == {"host": 5 * PAGE_TOKENS, "storage": 0}
    told = [line for line in lines if "other namespaces" in line]
    assert len(told) == 1
    assert "weights" in told[0]


@contextmanager
def _kvhoist_log() -> Iterator[list[str]]:
    """Collect the messages of the connector's logger, which vLLM's settings keep from the root's handlers."""
    logger = logging.getLogger("vllm.kvhoist")
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep()
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


BAD_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "unknown key": ({"host_bytez": "1GiB", "host_bytes": "1MiB"}, {}, ConfigError, "Did you mean 'host_bytes'"),
    "no host tier": ({}, {}, ConfigError, "lacks host_bytes"),
    "too large": ({"host_bytes": "1000TiB"}, {}, HostMemoryError, "memory"),
    "too small": ({"host_bytes": "1KiB"}, {}, ConfigError, "page"),
    "policy": ({"host_bytes": "1MiB", "write_policy": "write_back"}, {}, PolicyError, "write_back"),
    "storage": ({"host_bytes": "1MiB", "storage": "file:/proc/nowhere"}, {}, KvhoistError, "/proc/nowhere"),
    "prefix caching": ({"host_bytes": "1MiB"}, {"enable_prefix_caching": False}, ConfigError, "prefix caching is off"),
    "role": ({"host_bytes": "1MiB"}, {"kv_role": "kv_neither"}, ValueError, "kv_neither"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_bad_setting_is_one_clear_message_at_the_start(llama: Path, case: str) -> None:
    settings, options, kind, text = BAD_SETTINGS[case]
    with pytest.raises(kind, match=text), engine(llama, settings, **options):
        pass


def test_on_error_disable_starts_the_engine_without_the_cache(
    llama: Path, computed_and_kept: tuple[Answer, Answer]
) -> None:
    settings = {"host_bytes": "1000TiB", "on_error": "disable"}
    with _kvhoist_log() as lines, engine(llama, settings) as opened:
        assert opened.ask(PROMPT) == computed_and_kept[0]
        assert opened.ask(PROMPT) == computed_and_kept[1]
        opened.forget_device()
        assert opened.ask(PROMPT) == computed_and_kept[0]
        assert opened.scheduler_side is None
    assert [line for line in lines if line.startswith("kvhoist is off: ")]
