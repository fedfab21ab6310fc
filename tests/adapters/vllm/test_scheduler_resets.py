"""Resets where vLLM cannot let go of everything, layerwise loads that fail, stores that hang: no stale page, no step
that waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import SimEngine, generate, prompt_of
from vllm_harness_faults import Gate, copy_faults, store_faults
from vllm_harness_kv import HAS_LAYOUTS
from vllm_harness_kvhoist import audit, host_pages, settle, side

from kvhoist import early_persist
from kvhoist.adapters.vllm import prefixes
from kvhoist.control.tiers import Tier
from kvhoist.messages import JobKind

Sim = Callable[..., SimEngine]
PROMPT = prompt_of("a", 33)


def loading_again(engine: SimEngine) -> list[str]:
    """Names of requests that were preempted and are loading what they had."""
    requests = engine.scheduler.requests.items()
    return [name for name, one in requests if one.num_preemptions and one.status.name == "WAITING_FOR_REMOTE_KVS"]


def test_pages_of_the_old_weights_that_a_preempted_request_is_loading_are_not_offered_anew(sim: Sim) -> None:
    engine = sim(blocks=20, max_seqs=4)
    gate = Gate()
    with copy_faults(gate, kinds=[JobKind.LOAD]):
        names = [engine.add(prompt_of(str(i), 25), 30) for i in range(4)]
        gate.close()
        engine.run(lambda: bool(loading_again(engine)))
        (loading,) = loading_again(engine)
        engine.abort(*(name for name in names if name != loading and not engine.told[name].is_over))
        assert not engine.reset(connector=True)
        gate.open()
        settle(engine)
    assert host_pages(engine) == 0


def test_hits_on_blocks_that_vllm_could_not_forget_are_not_offered_under_the_new_weights(sim: Sim) -> None:
    engine = sim()
    running = engine.add(PROMPT, 40)
    engine.run(lambda: len(engine.told[running].tokens) > 2)
    assert not engine.reset(connector=True)

    assert engine.ask(PROMPT, 2).num_local == 32
    settle(engine)
    assert host_pages(engine) == 0

    assert engine.reset(connector=True)
    engine.ask(PROMPT, 2)
    assert engine.ask(PROMPT + generate(PROMPT, 1) + prompt_of("b", 20), 2).num_local == 32
    settle(engine)
    assert host_pages(engine) == 6, "after a whole reset local hits are offered again"


@pytest.mark.skipif(not HAS_LAYOUTS, reason="releases before 0.32 free the blocks of what is aborted at once")
def test_hits_on_blocks_of_an_aborted_request_that_a_step_still_writes_are_not_offered_under_the_new_weights(
    sim: Sim,
) -> None:
    """Where steps are planned ahead, vLLM frees such blocks later, and cannot reset its device before."""
    engine = sim(async_scheduling=True)
    aborted = engine.add(PROMPT, 40)
    engine.run(lambda: len(engine.told[aborted].tokens) > 2)
    engine.abort(aborted)
    assert not engine.reset(connector=True)

    assert engine.ask(PROMPT, 2).num_local == 32
    settle(engine)
    assert host_pages(engine) == 0

    assert engine.reset(connector=True)
    engine.ask(PROMPT, 2)
    settle(engine)
    assert host_pages(engine) == 4, "after a whole reset all is offered again"


@pytest.mark.parametrize("v2", [False, *([True] if HAS_LAYOUTS else [])])
def test_what_a_reset_preempted_is_computed_and_offered_anew(sim: Sim, v2: bool) -> None:
    engine = sim(v2=v2)
    engine.add(PROMPT, 8)
    for _ in range(3):
        engine.step()
    assert engine.reset(running=True, connector=True)
    settle(engine)
    assert host_pages(engine) == 5


def test_a_write_that_hangs_in_storage_never_holds_up_a_step(
    sim: Sim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reset forgets pages that are on their way to storage. Their host pages are filled again, but for that one that
    storage does not give back."""
    monkeypatch.setattr(early_persist, "_MOST_WAIT_S", 0.05)
    engine = sim({"storage": f"file:{tmp_path}"}, pages=4)
    put, offload = Gate(), Gate()
    with store_faults("put", put), copy_faults(offload, kinds=[JobKind.OFFLOAD]):
        put.close()
        offload.close()
        engine.add(PROMPT, 4)
        engine.run(lambda: offload.waiting > 0)
        engine.reset(connector=True)
        offload.open()
        for i in range(8):
            engine.ask(prompt_of(str(i), 33), 4)
        audit(engine)
        put.open()
        settle(engine)


PLANS_AHEAD: list[dict[str, Any]] = [
    {"async_scheduling": True},
    {"async_scheduling": True, "late": True},
    *([{"pp": 2, "late": True}] if HAS_LAYOUTS else []),
]


@pytest.mark.parametrize("engine_options", PLANS_AHEAD, ids=str)
@pytest.mark.parametrize("failed", [0, 3])
@pytest.mark.parametrize("more_tokens", [1, 60])
def test_a_layerwise_load_that_fails_is_never_computed_with_by_a_step_planned_ahead(
    sim: Sim, engine_options: dict[str, Any], failed: int, more_tokens: int
) -> None:
    engine = sim({"layerwise": True}, max_batched=32, blocks=64, **engine_options)
    engine.ask(PROMPT, 1)
    settle(engine)
    assert engine.reset()
    prompt = PROMPT[:32] + prompt_of("b", more_tokens)
    with copy_faults(lambda job, rank: [failed], kinds=[JobKind.LOAD]):
        engine.ask(prompt, 20)
        settle(engine)
    assert engine.reset()
    engine.ask(prompt + generate(prompt, 20), 2)


def test_what_an_aborted_request_computed_over_a_failed_layerwise_load_is_offered_to_nobody(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "_REFUSED_S", 0.0)
    engine = sim({"layerwise": True})
    longer = PROMPT + prompt_of("more", 24)
    engine.ask(PROMPT, 1)
    settle(engine)
    assert engine.reset()
    with copy_faults(lambda job, rank: [1], kinds=[JobKind.LOAD]):
        engine.abort(engine.add(longer, 5), during_step=True)
        settle(engine)
    assert engine.reset()
    assert engine.ask([*longer, 1], 3).num_external == 32


def test_a_request_that_shares_blocks_which_a_layerwise_load_did_not_bring_offers_none_of_them(sim: Sim) -> None:
    """vLLM lets the request that loaded compute them in the next step, which is late for an offload before it."""
    engine = sim({"layerwise": True}, blocks=160, max_batched=400, pages=128)
    prompt = prompt_of("a", 200)
    engine.ask(prompt, 1)
    settle(engine)
    assert engine.reset()
    with copy_faults(lambda job, rank: [3], kinds=[JobKind.LOAD]):
        for i in range(2):
            engine.add([*prompt, i], 12)
        engine.step()
    side(engine).plane.directory.evict(Tier.HOST, 128)
    settle(engine)
    assert engine.reset()
    assert engine.ask(prompt, 3).num_external == 196
