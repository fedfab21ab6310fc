"""Aborts in every state, preemption, and resets: nothing leaks, nobody waits for ever, nothing stale is hit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import SimEngine, generate, prompt_of
from vllm_harness_faults import Gate, copy_faults, slow_copies, store_faults
from vllm_harness_kvhoist import audit, host_pages, num_jobs, remembered, settle, store_in

from kvhoist.messages import JobKind

Sim = Callable[..., SimEngine]
PROMPT = prompt_of("a", 33)


def status(engine: SimEngine, name: str) -> str | None:
    request = engine.scheduler.requests.get(name)
    return None if request is None else request.status.name


def step_until(engine: SimEngine, name: str, state: str) -> None:
    engine.run(lambda: status(engine, name) == state)


@pytest.mark.parametrize("during_step", [False, True])
def test_aborted_before_it_was_ever_scheduled(sim: Sim, during_step: bool) -> None:
    engine = sim(max_seqs=1)
    first, second = engine.add(PROMPT, 8), engine.add(PROMPT, 8)
    engine.step()
    assert status(engine, second) == "WAITING"
    engine.abort(second, during_step=during_step)
    engine.run()
    assert engine.told[first].finish_reason == "length"


@pytest.mark.parametrize("during_step", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_aborted_while_running(sim: Sim, during_step: bool, async_scheduling: bool) -> None:
    engine = sim(async_scheduling=async_scheduling, late=async_scheduling)
    name = engine.add(PROMPT, 50)
    engine.run(lambda: len(engine.told[name].tokens) >= 9)
    engine.abort(name, during_step=during_step)
    settle(engine)
    assert engine.reset()
    # What it had computed of confirmed tokens is kept: 33 + 9 tokens and more were computed, so 5 whole pages.
    said = engine.told[name].tokens
    told = engine.ask(PROMPT + generate(PROMPT, 50)[: len(said)] + [1], 2)
    assert (told.num_external or 0) >= 40


@pytest.mark.parametrize("engine_options", [{}, {"tp": 2}, {"async_scheduling": True, "late": True}])
@pytest.mark.parametrize("how_many", [1, 3])
def test_aborted_while_its_load_is_under_way(sim: Sim, engine_options: dict[str, Any], how_many: int) -> None:
    """vLLM keeps the blocks until the load is over; the connector must tell it, and give its own pins back."""
    engine = sim(**engine_options)
    engine.ask(PROMPT, 1)
    settle(engine)
    assert engine.reset()
    gate = Gate()
    with copy_faults(gate, kinds=[JobKind.LOAD]):
        gate.close()
        names = [engine.add([*PROMPT, i], 4) for i in range(how_many)]
        engine.run(lambda: gate.waiting > 0)
        assert status(engine, names[0]) == "WAITING_FOR_REMOTE_KVS"
        engine.abort(*names)
        for _ in range(20):
            engine.step()
        assert engine.leaked_blocks(), "blocks that a load still writes are not free"
        audit(engine)
        gate.open()
        settle(engine)
    assert engine.leaked_blocks() == []
    assert engine.ask(PROMPT, 2).num_external == 32


def test_aborted_between_a_load_and_the_step_that_hears_of_it(sim: Sim) -> None:
    engine = sim()
    engine.ask(PROMPT, 1)
    settle(engine)
    assert engine.reset()
    name = engine.add(PROMPT, 4)
    step_until(engine, name, "WAITING_FOR_REMOTE_KVS")
    while name not in engine.scheduler.finished_recving_kv_req_ids:
        engine.step()
        if status(engine, name) != "WAITING_FOR_REMOTE_KVS":
            pytest.skip("it was scheduled in the step that heard of its load")
    engine.abort(name)
    settle(engine)


@pytest.mark.parametrize("waits_for", [JobKind.LOOKUP, JobKind.PREFETCH])
def test_aborted_while_it_waits_for_storage(sim: Sim, tmp_path: Path, waits_for: JobKind) -> None:
    engine = sim({"storage": store_in(tmp_path)})
    engine.ask(PROMPT, 1)
    settle(engine)
    engine.close()
    engine = sim({"storage": store_in(tmp_path), "lookup_timeout_s": 60, "prefetch_timeout_s": 60})
    gate = Gate()
    method = "exists" if waits_for is JobKind.LOOKUP else "get"
    with store_faults(method, gate):
        gate.close()
        name = engine.add(PROMPT, 4)
        engine.run(lambda: gate.waiting > 0)
        assert status(engine, name) == "WAITING"
        engine.abort(name)
        for _ in range(5):
            engine.step()
        audit(engine)
        gate.open()
        settle(engine)
    assert engine.ask(PROMPT, 2).num_external == 32


def test_an_id_may_be_used_again_at_once(sim: Sim) -> None:
    engine = sim()
    for i in range(6):
        name = engine.add(PROMPT, 20, name="same")
        for _ in range(i):
            engine.step()
        engine.abort(name)
    other = prompt_of("other", 30)
    engine.add(other, 5, name="same")
    settle(engine)
    assert engine.told["same"].tokens == generate(other, 5)


def test_a_preempted_request_comes_back_and_loads_what_it_had(sim: Sim) -> None:
    engine = sim(blocks=20, max_seqs=4)
    with slow_copies(5):
        names = [engine.add(prompt_of(str(i), 25), 30) for i in range(4)]
        engine.run(lambda: any(request.num_preemptions for request in engine.scheduler.requests.values()))
        settle(engine)
    assert num_jobs(engine, JobKind.LOAD) > 0, "what was preempted is loaded, not computed again"
    assert all(engine.told[name].finish_reason == "length" for name in names)


@pytest.mark.parametrize(
    "engine_options",
    [{}, {"async_scheduling": True}, {"num_spec": 3}, {"tp": 2}, {"policy": "priority"}],
    ids=["plain", "async", "spec", "tp2", "priority"],
)
def test_constant_preemption_ends(sim: Sim, engine_options: dict[str, Any]) -> None:
    engine = sim(blocks=18, max_seqs=6, **engine_options)
    with slow_copies(6):
        for i in range(40):
            engine.add(prompt_of(str(i % 5), 20 + i % 13), 15, priority=i % 3)
        settle(engine)


def test_a_preempted_request_is_never_offered_from_blocks_it_has_lost(sim: Sim) -> None:
    """Offload what was preempted late, while others write its former blocks."""
    engine = sim(blocks=16, max_seqs=3)
    with slow_copies(7, most_s=0.01):
        for round_ in range(5):
            for i in range(3):
                engine.add(prompt_of(f"{round_}.{i}", 18), 24)
            settle(engine)
    for round_ in range(5):
        for i in range(3):
            assert engine.reset()
            prompt = prompt_of(f"{round_}.{i}", 18)
            engine.ask(prompt + generate(prompt, 24), 1)


def test_a_reset_of_the_connector_forgets_all_pages_of_the_old_weights(sim: Sim, tmp_path: Path) -> None:
    engine = sim({"storage": store_in(tmp_path)})
    engine.ask(PROMPT, 3)
    settle(engine)
    assert host_pages(engine) == 4
    engine.setup.weights = "new weights"
    assert engine.reset(connector=True)
    assert host_pages(engine) == 0

    assert engine.ask(PROMPT, 3).num_external == 0
    settle(engine)
    assert engine.reset()
    assert engine.ask(PROMPT, 3).num_external == 32


@pytest.mark.parametrize("when", [1, 2, 3, 5, 8, 12])
def test_what_requests_go_on_to_compute_over_old_kv_is_offered_to_nobody(sim: Sim, when: int) -> None:
    """vLLM cannot forget blocks that requests use. They go on with their old KV; the connector keeps none of it."""
    engine = sim()
    for i in range(3):
        engine.add(prompt_of(str(i), 29), 12)
    for _ in range(when):
        engine.step()
    engine.reset(connector=True)
    settle(engine)
    assert host_pages(engine) == 0
    assert engine.reset()

    engine.setup.weights = "new weights"
    for i in range(3):
        assert engine.ask(prompt_of(str(i), 29), 2).num_external == 0


def test_a_request_that_was_waiting_at_the_reset_is_cached_under_the_new_weights(sim: Sim) -> None:
    engine = sim(max_seqs=1)
    engine.add(prompt_of("running", 29), 6)
    for _ in range(2):
        engine.step()
    waiting = engine.add(PROMPT, 6)
    engine.step()
    assert status(engine, waiting) == "WAITING"
    engine.reset(connector=True)
    settle(engine)
    assert engine.reset()
    assert engine.ask(PROMPT, 2).num_external == 32


def test_a_reset_while_a_load_is_under_way_says_that_it_is_not_done(sim: Sim) -> None:
    engine = sim()
    engine.ask(PROMPT, 1)
    settle(engine)
    assert engine.reset()
    gate = Gate()
    with copy_faults(gate, kinds=[JobKind.LOAD]):
        gate.close()
        name = engine.add(PROMPT, 4)
        step_until(engine, name, "WAITING_FOR_REMOTE_KVS")
        assert not engine.reset(connector=True)
        audit(engine)
        gate.open()
        settle(engine)
    assert host_pages(engine) == 0
    assert engine.reset(connector=True)


@pytest.mark.parametrize("connector", [False, True])
@pytest.mark.parametrize("engine_options", [{}, {"num_spec": 3}, {"tp": 2}], ids=["plain", "spec", "tp2"])
def test_running_requests_survive_a_reset_that_preempts_them(
    sim: Sim, connector: bool, engine_options: dict[str, Any]
) -> None:
    engine = sim(**engine_options)
    for i in range(4):
        engine.add(prompt_of(str(i), 20), 15)
    for _ in range(6):
        engine.step()
    assert engine.reset(running=True, connector=connector)
    audit(engine)
    settle(engine)


def test_a_finished_request_leaves_no_state(sim: Sim) -> None:
    engine = sim()
    for i in range(20):
        engine.ask(prompt_of(str(i), 17), 2)
    settle(engine)
    assert remembered(engine) == {}
