"""One engine prefills and persists, another one prefetches and decodes: what they say to each other, and who waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mooncake_support import Master, running_master
from vllm_harness import SimEngine, prompt_of
from vllm_harness_faults import Gate, store_faults
from vllm_harness_kvhoist import num_jobs, settle, store_in

from kvhoist.messages import JobKind

Sim = Callable[..., SimEngine]
PROMPT = prompt_of("a", 37)
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
"""What routers made for vLLM's own connectors send to the engine that prefills."""

PREFILLS, DECODES = {"kv_role": "kv_producer"}, {"kv_role": "kv_consumer"}


def prefill(engine: SimEngine, prompt: list[int] = PROMPT) -> dict[str, Any]:
    said = engine.ask(prompt, 1, transfer=TO_DECODE).hand_over
    assert said is not None
    return said


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    with running_master(tmp_path) as master:
        yield master


def test_two_engines_on_one_mooncake_one_only_persists_the_other_only_loads(sim: Sim, master: Master) -> None:
    """At once: nobody waits for the first engine's writes but the second."""
    settings = {"storage": master.url(), "lookup_timeout_s": 30}
    first, second = sim(settings, connector=PREFILLS), sim(settings, connector=DECODES)
    stranger = sim({**settings, "tenant": "another", "lookup_timeout_s": 0.1}, connector=DECODES)
    for name in "abc":
        prompt = prompt_of(name, 37)
        said = prefill(first, prompt)
        first.run()
        told = second.ask(prompt, 6, transfer=said)
        assert (told.num_local, told.num_external) == (0, 32)
        assert stranger.ask(prompt, 6, transfer=said).num_external == 0
    settle(first)
    settle(second)
    assert num_jobs(second, JobKind.OFFLOAD) == num_jobs(second, JobKind.PERSIST) == 0
    assert num_jobs(second, JobKind.LOAD) == 3
    assert num_jobs(first, JobKind.LOAD) == num_jobs(first, JobKind.LOOKUP) == num_jobs(first, JobKind.PREFETCH) == 0
    assert num_jobs(first, JobKind.PERSIST) > 0


def test_the_second_engine_waits_for_pages_that_were_announced_and_serves_others_meanwhile(
    sim: Sim, tmp_path: Path
) -> None:
    settings = {"storage": store_in(tmp_path), "lookup_timeout_s": 30}
    first, second = sim(settings, connector=PREFILLS), sim(settings, connector=DECODES)
    gate = Gate()
    with store_faults("put", gate):
        gate.close()
        said = prefill(first)
        first.run()
        unannounced = second.ask([*PROMPT[:33], 1], 2)
        assert unannounced.num_external == 0, "what nobody announced is asked for once"
        assert second.reset()
        waits = second.add(PROMPT, 6, transfer=said)
        second.run(lambda: num_jobs(second, JobKind.LOOKUP) >= 4)
        assert second.ask(prompt_of("b", 5), 40).is_over
        assert second.told[waits].tokens == []
        gate.open()
        second.run(lambda: second.told[waits].is_over)
    assert second.told[waits].num_external == 32


def test_pages_that_do_not_come_are_waited_for_once_and_computed(sim: Sim, tmp_path: Path) -> None:
    settings = {"storage": store_in(tmp_path), "lookup_timeout_s": 0.2}
    first, second = sim(settings, connector=PREFILLS), sim(settings, connector=DECODES)
    gate = Gate()
    with store_faults("put", gate):
        gate.close()
        said = prefill(first)
        first.run()
        assert second.ask(PROMPT, 6, transfer=said).num_external == 0
        gate.open()
    settle(first)
    assert second.reset()
    assert second.ask(PROMPT, 6, transfer=said).num_external == 32


def test_a_router_that_announces_by_itself_is_understood(sim: Sim, tmp_path: Path) -> None:
    settings = {"storage": store_in(tmp_path), "lookup_timeout_s": 30}
    first, second = sim(settings), sim(settings)
    gate = Gate()
    with store_faults("put", gate):
        gate.close()
        first.ask(PROMPT, 1)
        first.run()
        waits = second.add(PROMPT, 6, transfer={"do_remote_prefill": True, "kvhoist_tokens": "many"})
        second.run(lambda: num_jobs(second, JobKind.LOOKUP) >= 2)
        gate.open()
        second.run(lambda: second.told[waits].is_over)
    assert second.told[waits].num_external == 32


@pytest.mark.parametrize(
    ("extra", "connector", "transfer"),
    [
        ({}, PREFILLS, None),
        ({}, PREFILLS, {"do_remote_decode": False}),
        ({}, DECODES, TO_DECODE),
        ({"write_policy": "write_through_selective"}, PREFILLS, TO_DECODE),
        ({"storage": None}, PREFILLS, TO_DECODE),
    ],
)
def test_nothing_is_announced_that_need_not_come(
    sim: Sim, tmp_path: Path, extra: dict[str, Any], connector: dict[str, str], transfer: dict[str, Any] | None
) -> None:
    engine = sim({"storage": store_in(tmp_path), **extra}, connector=connector)
    assert engine.ask(PROMPT, 1, transfer=transfer).hand_over is None


def test_only_pages_that_are_whole_are_announced(sim: Sim, tmp_path: Path) -> None:
    engine = sim({"storage": store_in(tmp_path)}, connector=PREFILLS)
    assert prefill(engine)["kvhoist_tokens"] == 32
    assert prefill(engine, prompt_of("b", 7))["kvhoist_tokens"] == 0
