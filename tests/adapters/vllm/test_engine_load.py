"""vLLM itself under load: many requests on a device cache that cannot hold them, each page checked after its load."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm_models import Answer, Engine, engine, prompt_of, write_tiny_llama

NUM_TALKS, NUM_TURNS = 12, 3
SMALL = {"num_gpu_blocks_override": 40, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("engine") / "llama")


def _hold(opened: Engine, *, seed: int = 5) -> list[list[Answer]]:
    """Hold all talks side by side, some with a common beginning, and return the answers turn by turn."""
    draw = random.Random(seed)
    system = prompt_of(150, 99)
    talks = [[*(system if i % 3 else []), *prompt_of(draw.randrange(100, 250), i)] for i in range(NUM_TALKS)]
    turns = []
    for turn in range(NUM_TURNS):
        answers = opened.run(talks, draw.randrange(30, 60))
        turns.append(answers)
        for i, answer in enumerate(answers):
            talks[i] += [*answer.tokens, *prompt_of(draw.randrange(5, 50), 100 * turn + i)]
    return turns


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[tuple[int, ...]]]:
    """The tokens of an engine without a connector that has room for all."""
    with engine(llama, num_gpu_blocks_override=800) as plain:
        return _tokens(_hold(plain))


def _tokens(turns: list[list[Answer]]) -> list[list[tuple[int, ...]]]:
    return [[answer.tokens for answer in answers] for answers in turns]


def _check(opened: Engine, turns: list[list[Answer]], expected: list[list[tuple[int, ...]]]) -> None:
    assert _tokens(turns) == expected
    opened.settle()
    opened.ask(prompt_of(10, 9), 1)
    assert sum(opened.hits().values()) > 1000
    assert opened.counter("vllm:kvhoist_mismatched_pages") == 0
    assert opened.counter("vllm:kvhoist_failed_pages", kind="load") == 0


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
def test_preempted_and_evicted_requests_end_as_if_there_had_been_room(
    llama: Path, expected: Any, tmp_path: Path, layerwise: bool
) -> None:
    settings = {
        "host_bytes": "3MiB",  # fewer pages than the talks have, so that some come from disk
        "storage": f"file:{tmp_path / 'kv'}",
        "debug_verify": True,
        "layerwise": layerwise,
    }
    with engine(llama, settings, **SMALL) as opened:
        _check(opened, _hold(opened), expected)
        assert opened.counter("vllm:num_preemptions") > 0
        assert opened.counter("vllm:kvhoist_evicted_pages") > 0
        assert opened.hits()["storage"] > 0


def test_async_scheduling_gives_the_same_tokens(llama: Path, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM turns it off on the CPU; its scheduler and runner can do it there all the same."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def keep_async(_: Any, vllm_config: Any) -> None:
        update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_async))
    with engine(llama, {"host_bytes": "64MiB", "debug_verify": True}, async_scheduling=True, **SMALL) as opened:
        assert opened.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        assert type(opened.scheduler).__name__ == "AsyncScheduler"
        _check(opened, _hold(opened), expected)
