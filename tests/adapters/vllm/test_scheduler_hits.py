"""What the connector loads and offers under vLLM's real scheduler: exactly the right tokens, with the right KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mover_support import until
from vllm_harness import LAYOUTS, SimEngine, generate, prompt_of
from vllm_harness_executor import KvMismatch
from vllm_harness_faults import Gate, copy_faults, corrupt_host_pages, slow_copies
from vllm_harness_kv import HAS_LAYOUTS
from vllm_harness_kvhoist import host_pages, movers, num_jobs, parts_of, settle, side, store_in

from kvhoist.messages import JobKind

BLOCK, PAGE = 4, 8
Sim = Callable[..., SimEngine]

ENGINES: list[Any] = [
    pytest.param({}, id="plain"),
    pytest.param({"async_scheduling": True}, id="async"),
    pytest.param({"async_scheduling": True, "late": True}, id="async-late"),
    pytest.param({"num_spec": 3}, id="spec"),
    pytest.param({"num_spec": 3, "async_scheduling": True, "late": True}, id="async-spec-late"),
    pytest.param({"tp": 2}, id="tp2"),
]
if HAS_LAYOUTS:
    ENGINES += [
        pytest.param({"pp": 2, "late": True}, id="pp2-late"),
        pytest.param({"tp": 2, "pp": 2, "async_scheduling": True}, id="tp2-pp2"),
        pytest.param({"v2": True, "async_scheduling": True, "late": True}, id="second-runner-late"),
    ]


def expected_external(computed_tokens: int, prompt_tokens: int, local_tokens: int = 0, page: int = PAGE) -> int:
    """The oracle of a hit: whole pages of the prompt that were computed before, in whole blocks below the last token,
    beyond what the device has."""
    whole_pages = min(computed_tokens, prompt_tokens) // page * page
    return max(0, min(whole_pages, (prompt_tokens - 1) // BLOCK * BLOCK) - local_tokens)


def after_a_turn(turn_tokens: int, prompt_tokens: int, *, speculates: bool = False) -> set[int]:
    """External hits after a turn of `turn_tokens`. Its last token, only sampled, was not computed, unless a drafter had
    guessed it."""
    computed = {turn_tokens - 1, turn_tokens} if speculates else {turn_tokens - 1}
    return {expected_external(tokens, prompt_tokens) for tokens in computed}


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("engine_options", ENGINES)
def test_what_the_device_forgot_is_loaded_to_the_token(
    sim: Sim, engine_options: dict[str, Any], layerwise: bool
) -> None:
    with slow_copies(1):
        engine = sim({"layerwise": layerwise}, **engine_options)
        first = prompt_of("a", 37)
        assert engine.ask(first, 11).num_external == 0
        settle(engine)
        assert engine.reset()

        second = first + generate(first, 11) + prompt_of("b", 9)
        told = engine.ask(second, 3)

        assert told.num_local == 0
        assert told.num_external in after_a_turn(37 + 11, len(second), speculates="num_spec" in engine_options)
        assert num_jobs(engine, JobKind.LOAD) <= 1


@pytest.mark.parametrize("prompt_tokens", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 25])
def test_the_last_token_of_a_prompt_is_always_computed(sim: Sim, prompt_tokens: int) -> None:
    engine = sim()
    engine.ask(prompt_of("a", 40), 2)
    settle(engine)
    assert engine.reset()

    told = engine.ask(prompt_of("a", prompt_tokens), 2)

    assert told.num_external == expected_external(41, prompt_tokens)
    assert told.num_external < prompt_tokens


@pytest.mark.parametrize("local_tokens", [4, 8, 12, 16])
@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_leaves_alone_the_blocks_that_the_device_has(sim: Sim, local_tokens: int, layerwise: bool) -> None:
    engine = sim({"layerwise": layerwise})
    prompt = prompt_of("a", 33)
    engine.ask(prompt, 2)
    settle(engine)
    assert engine.reset()
    engine.ask([*prompt[:local_tokens], 1, 2], 1)
    settle(engine)
    before = engine.setup.num_steps

    told = engine.ask(prompt, 2)

    assert told.num_local == local_tokens
    assert told.num_external == expected_external(34, 33, local_tokens)
    assert engine.setup.num_steps > before


def test_a_hit_on_blocks_that_the_same_step_computes_is_not_offered_before_they_are(sim: Sim) -> None:
    """vLLM lets a request hit blocks that another request of the same batch is about to compute."""
    engine = sim()
    # The blocks that the two requests get must hold other bytes before.
    engine.ask(prompt_of("old", 100), 1)
    settle(engine)
    prompt = prompt_of("a", 24)
    engine.add(prompt, 2)
    second = engine.add([*prompt[:16], 5, 6, 7], 2)
    settle(engine)
    assert engine.told[second].num_local == 16
    assert engine.reset()

    assert engine.ask(prompt, 2).num_external == 20
    settle(engine)
    assert engine.ask([*prompt[:16], 5, 6, 7], 2).num_local == 16


@pytest.mark.parametrize("engine_options", ENGINES)
def test_64_requests_on_one_prefix_cause_one_load(sim: Sim, engine_options: dict[str, Any]) -> None:
    engine = sim(blocks=48, **engine_options)
    prefix = prompt_of("a", 64)
    engine.ask(prefix, 1)
    settle(engine)
    assert engine.reset()

    with slow_copies(2, most_s=0.02):
        names = [engine.add([*prefix, i, i + 1], 2) for i in range(64)]
        engine.run()

    assert num_jobs(engine, JobKind.LOAD) == 1
    hits = [engine.told[name].num_local + engine.told[name].num_external for name in names]  # type: ignore[operator]
    assert hits == [64] * 64
    assert sum(engine.told[name].num_external or 0 for name in names) == 64


def test_requests_of_other_salts_share_nothing(sim: Sim) -> None:
    engine = sim()
    prompt = prompt_of("a", 33)
    for salt in ("", "one", "two"):
        assert engine.ask(prompt, 2, salt=salt).num_external == 0
        settle(engine)
        assert engine.reset()
    for salt in ("two", "", "one"):
        assert engine.ask(prompt, 2, salt=salt).num_external == 32
        settle(engine)
        assert engine.reset()
    assert engine.ask(prompt, 2, salt="three").num_external == 0


@pytest.mark.parametrize("blocks_per_page", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_page_size_gives_the_same_bytes_back(sim: Sim, layout: str, blocks_per_page: int) -> None:
    engine = sim({"blocks_per_page": blocks_per_page}, layout=layout, pages=96)
    page = blocks_per_page * BLOCK
    for i in range(4):
        engine.ask(prompt_of(str(i), 30 + 5 * i), 6)
    settle(engine)
    assert engine.reset()
    for i in range(4):
        told = engine.ask(prompt_of(str(i), 30 + 5 * i), 6)
        assert told.num_external == expected_external(30 + 5 * i + 5, 30 + 5 * i, page=page)
        assert engine.reset()


@pytest.mark.parametrize("engine_options", [{"tp": 2, "layout": "MLA"}, {"tp": 2, "layout": LAYOUTS[1]}])
def test_ranks_that_hold_the_same_and_ranks_that_do_not(
    sim: Sim, tmp_path: Any, engine_options: dict[str, Any]
) -> None:
    engine = sim({"storage": store_in(tmp_path)}, **engine_options)
    prompt = prompt_of("a", 41)
    engine.ask(prompt, 1)
    settle(engine)
    stored = [part.stores.current.store.stats().put_pages for part in parts_of(engine)]
    assert stored == ([5, 0] if engine_options["layout"] == "MLA" else [5, 5])
    assert engine.reset()
    assert engine.ask(prompt, 1).num_external == 40


@pytest.mark.parametrize("num_spec", [1, 3, 5])
@pytest.mark.parametrize("late", [False, True])
def test_only_confirmed_tokens_are_offered_under_speculation(sim: Sim, num_spec: int, late: bool) -> None:
    """Rejected drafts leave their KV in the slots of the tokens that follow; no page may be offered with it."""
    engine = sim(num_spec=num_spec, async_scheduling=late, late=late, pages=256)
    with slow_copies(num_spec):
        for i in range(6):
            prompt = prompt_of(str(i), 6 + i)
            engine.ask(prompt, 40)
            settle(engine)
            assert engine.reset()
            told = engine.ask(prompt + generate(prompt, 40), 2)
            assert told.num_external in after_a_turn(6 + i + 40, 6 + i + 40, speculates=True)
    assert num_jobs(engine, JobKind.OFFLOAD) >= 6


def test_a_tiny_host_tier_keeps_caching_what_was_used_last(sim: Sim) -> None:
    engine = sim(pages=6)
    for i in range(12):
        engine.ask(prompt_of(str(i), 33), 1)
        settle(engine)
    assert host_pages(engine) == 6
    assert engine.reset()
    assert engine.ask(prompt_of("11", 33), 1).num_external == 32
    assert engine.ask(prompt_of("3", 33), 1).num_external == 0


def test_a_step_that_gives_a_block_away_waits_for_the_offload_that_reads_it(sim: Sim) -> None:
    """Slow offloads, and a device so small that each next request gets the blocks of the last one."""
    engine = sim(blocks=14)
    with slow_copies(3, most_s=0.01):
        for i in range(30):
            engine.add(prompt_of(str(i % 7), 33), 3)
        settle(engine)
    for i in range(7):
        assert engine.reset()
        assert engine.ask(prompt_of(str(i), 33), 1).num_external == 32


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_load_waits_for_the_offload_that_reads_its_target(sim: Sim, layerwise: bool) -> None:
    """The second request fills the device; the blocks that it leaves are the only ones that the third can load into."""
    engine = sim({"layerwise": layerwise}, blocks=10)
    engine.ask(prompt_of("a", 33), 1)
    settle(engine)
    assert engine.reset()
    with slow_copies(8, most_s=0.2, kinds=[JobKind.OFFLOAD]):
        engine.ask(prompt_of("b", 33), 1)
        assert engine.ask(prompt_of("a", 33), 1).num_external == 32
        settle(engine)
    assert engine.reset()
    assert engine.ask(prompt_of("b", 33), 1).num_external == 32


def test_a_stuck_offload_holds_back_only_the_step_that_needs_its_blocks(sim: Sim) -> None:
    engine = sim(blocks=64)
    gate = Gate()
    with copy_faults(gate, kinds=[JobKind.OFFLOAD]):
        gate.close()
        for i in range(3):
            engine.ask(prompt_of(str(i), 33), 4)
        until(lambda: gate.waiting == 1, "the offload thread at the gate")
        gate.open()
        settle(engine)
    assert host_pages(engine) == 12


def test_a_corrupted_host_page_is_seen_by_the_harness(sim: Sim) -> None:
    """The negative control of every test here."""
    engine = sim()
    engine.ask(prompt_of("a", 33), 1)
    settle(engine)
    corrupt_host_pages(engine)
    assert engine.reset()
    with pytest.raises(KvMismatch, match="read at position 0"):
        engine.ask(prompt_of("a", 33), 1)
    engine.close()


def test_debug_verify_turns_a_corrupted_host_page_into_a_recomputation(sim: Sim) -> None:
    engine = sim({"debug_verify": True})
    engine.ask(prompt_of("a", 33), 1)
    settle(engine)
    corrupt_host_pages(engine)
    assert engine.reset()
    engine.ask(prompt_of("a", 33), 5)
    settle(engine)
    assert sum(mover.num_mismatches for mover in movers(engine)) == 4
    assert side(engine).plane.flights.counters[JobKind.LOAD].failed_pages == 4


def test_an_engine_without_requests_has_told_all_hits(sim: Sim) -> None:
    """It takes no further step in which it could."""
    engine = sim()
    prompt, told = prompt_of("a", 33), 0.0
    engine.ask(prompt, 1)
    settle(engine)
    stats_of = engine.connector.get_kv_connector_stats
    engine.connector.get_kv_connector_stats = lambda: seen.append(stats_of()) or seen[-1]
    for i in range(3):
        assert engine.reset()
        seen: list[Any] = []
        engine.ask(prompt + prompt_of(f"new page {i}", 20), 1)
        engine.run()
        told += sum(stats.data.get("hit_tokens.host", 0) for stats in seen if stats is not None)
        assert told == 32 * (i + 1)
