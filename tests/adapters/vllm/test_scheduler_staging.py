"""`host_retain=0` under vLLM's scheduler: the host tier drains, storage gives the hits, every page is moved once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import SimEngine, prompt_of
from vllm_harness_faults import Gate, slow_copies, store_faults
from vllm_harness_kvhoist import audit, end, host_pages, num_jobs, settle, side, store_in

from kvhoist.adapters.vllm.options import ConnectorOptions
from kvhoist.errors import ConfigError, PolicyError
from kvhoist.messages import JobKind

Sim = Callable[..., SimEngine]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        ({}, {}),
        ({"tp": 2}, {}),
        ({}, {"layerwise": True}),
        ({}, {"write_policy": "write_through_selective", "min_hits": 1}),
        ({"async_scheduling": True, "late": True}, {}),
    ],
    ids=str,
)
def test_the_host_tier_drains_and_storage_gives_the_hits(
    sim: Sim, tmp_path: Path, ranks: dict[str, Any], options: dict[str, Any]
) -> None:
    """SimEngine compares every output, and every slot that attention reads."""
    settings = {"storage": store_in(tmp_path), "host_retain": 0, "lookup_timeout_s": 30, **options}
    engine = sim(settings, pages=12, **ranks)
    prompts = [prompt_of(str(i), 37) for i in range(12)]
    for prompt in prompts * 2:
        engine.ask(prompt, 3)
        settle(engine)
    audit(engine)
    assert host_pages(engine) == 0
    assert engine.reset()
    for prompt in prompts:
        told = engine.ask(prompt, 3)
        assert (told.num_local, told.num_external) == (0, 32)
        settle(engine)
        assert host_pages(engine) == 0
    end(engine)
    engine = sim(settings, pages=12, **ranks)
    names = [engine.add(prompt, 3) for prompt in prompts]
    settle(engine)
    hits = [(engine.told[name].num_local or 0) + (engine.told[name].num_external or 0) for name in names]
    assert sum(hits) >= 4 * 32, "a host tier of 12 pages stages three prompts at least, one after another"
    assert host_pages(engine) == 0


def test_what_is_on_the_device_and_in_storage_is_not_offloaded_again(sim: Sim, tmp_path: Path) -> None:
    engine = sim({"storage": store_in(tmp_path), "host_retain": 0})
    for _ in range(3):
        engine.ask(prompt_of("a", 37), 1)
        settle(engine)
    assert side(engine).plane.flights.counters[JobKind.OFFLOAD].pages == 4
    assert num_jobs(engine, JobKind.PREFETCH) == 0


def test_random_traffic_with_slow_copies_leaves_nothing_behind(sim: Sim, tmp_path: Path) -> None:
    engine = sim({"storage": store_in(tmp_path), "host_retain": 0}, pages=10, blocks=40)
    with slow_copies(7):
        for i in range(60):
            engine.add([*prompt_of(str(i * 7 % 5), 16 + i % 3 * 8), i % 4], 1 + i % 5)
            engine.step()
            if i % 20 == 13:
                engine.reset()
        settle(engine)
    audit(engine)
    assert host_pages(engine) == 0


def test_pages_that_a_waiting_request_was_brought_stay_until_it_loads_them(sim: Sim, tmp_path: Path) -> None:
    """Its blocks are held by another request meanwhile."""
    settings = {"storage": store_in(tmp_path), "host_retain": 0, "lookup_timeout_s": 30, "io_threads": 9}
    engine = sim(settings)
    engine.ask(prompt_of("a", 65), 1)
    end(engine)
    engine = sim(settings, blocks=24)
    gate = Gate()
    with store_faults("get", gate):
        gate.close()
        waiting = engine.add(prompt_of("a", 65), 1)
        engine.run(lambda: gate.waiting == 8)  # and one thread is left for what the other asks
        big = engine.add(prompt_of("big", 60), 20)  # takes 15 to 20 of the 24 blocks
        engine.run(lambda: len(engine.told[big].tokens) > 1)
        gate.open()
        engine.run(lambda: side(engine).plane.flights.counters[JobKind.PREFETCH].pages == 8)
        assert not engine.told[big].is_over
        engine.step()
        assert host_pages(engine) >= 8
        settle(engine)
    assert engine.told[waiting].num_external == 64
    assert host_pages(engine) == 0


def test_what_cannot_work_is_refused() -> None:
    for extra, error, text in (
        ({}, ConfigError, "none that is written"),
        ({"storage": "file:/x?read_only=true"}, ConfigError, "none that is written"),
        ({"storage": "file:/x", "prefetch_policy": "best_effort"}, PolicyError, "best_effort"),
        ({"storage": "file:/x", "host_retain": 3}, ConfigError, "None or 0"),
    ):
        with pytest.raises(error, match=text):
            ConnectorOptions.parse({"host_bytes": "1GiB", "host_retain": 0, **extra})
