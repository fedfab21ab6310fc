"""The host tier as staging only (`host_retain=0`): it holds what is on its way, and nothing else."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support import PAGE_TOKENS, TinyEngine, namespace, tiny_geometry

from kvhoist.config import CacheConfig
from kvhoist.control.directory import Directory
from kvhoist.control.keys import chain_hashes
from kvhoist.control.plane import ControlPlane
from kvhoist.control.policy import WritePolicy
from kvhoist.control.tiers import Tier
from kvhoist.errors import ConfigError, PolicyError
from kvhoist.messages import Completion, JobKind
from kvhoist.storage import MemoryStore

DEADLINE_S = 20
PROMPTS = [[i, *range(7 * PAGE_TOKENS)] for i in range(12)]
PAGES = 7


def engine_with(store: Any, *, device_pages: int = 24, host_pages: int = 8, **options: Any) -> TinyEngine:
    config = CacheConfig(host_retain=0, **options)
    return TinyEngine(device_pages=device_pages, host_pages=host_pages, store=store, config=config)


def held(engine: TinyEngine) -> int:
    """Pages in the host tier, when nothing is under way."""
    assert engine.cache.flush(DEADLINE_S)
    engine.cache.audit()
    host = engine.cache.stats().directory.tiers["host"]
    return host.ready_pages + host.filling_pages


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("eviction", ["lru", "slru", "lfu", "arc"])
def test_all_is_persisted_the_host_tier_drains_and_later_requests_load_from_storage(
    write_policy: str, eviction: str
) -> None:
    """Twelve prompts of seven pages through a device of 24 and a host tier of 8; `run` checks every byte."""
    store = MemoryStore()
    with engine_with(store, write_policy=write_policy, min_hits=1, eviction=eviction) as engine:
        for _ in range(2 if write_policy == "write_through_selective" else 1):
            for prompt in PROMPTS:
                engine.run(prompt)
                assert engine.cache.flush(DEADLINE_S)
        assert held(engine) == 0
        if write_policy != "write_through_selective":  # which writes what was used twice while it was on the device
            assert store.stats().num_pages == len(PROMPTS) * PAGES
            engine.scribble()
            engine.cache.evict("device", 24)
            for prompt in PROMPTS:
                assert engine.run(prompt) == {"device": 0, "host": 0, "storage": PAGES * PAGE_TOKENS}
                assert held(engine) == 0
        prefetches = engine.cache.stats().prefetches
        assert prefetches.hit_pages == prefetches.asked_pages
    with engine_with(store) as engine:
        hits = [engine.run(prompt)["storage"] for prompt in PROMPTS]
        assert sum(hits) == store.stats().num_pages * PAGE_TOKENS
        assert held(engine) == 0


def test_without_the_option_the_host_tier_keeps_what_storage_has() -> None:
    with TinyEngine(device_pages=24, host_pages=8, store=MemoryStore()) as engine:
        engine.run(PROMPTS[0])
        assert held(engine) == PAGES


def test_what_storage_has_is_not_offloaded_again() -> None:
    with engine_with(MemoryStore()) as engine:
        for _ in range(3):
            engine.run(PROMPTS[0])
            assert held(engine) == 0
        engine.cache.offload(engine.cache.match(PROMPTS[0]))
        assert held(engine) == 0
        assert engine.cache.stats().jobs["offload"]["pages"] == PAGES


def test_a_page_in_use_stays_until_it_is_given_back() -> None:
    with engine_with(MemoryStore(), host_pages=24) as engine:
        engine.run(PROMPTS[0])
        assert held(engine) == 0
        match = engine.cache.match(PROMPTS[0])
        coming = engine.cache.prefetch(match)
        assert coming is None, "the device has them"
        engine.cache.evict("device", 24)
        match = engine.cache.match(PROMPTS[0])
        coming = engine.cache.prefetch(match)
        assert coming is not None
        coming.wait(timeout_s=DEADLINE_S)
        pins = engine.cache.pin(match)
        assert held(engine) == PAGES, "ordered by hand: they wait for their load"
        with engine.cache.acquire(match) as lease:
            engine.check(PROMPTS[0], lease)
            assert held(engine) == PAGES
        engine.cache.unpin(pins)
        assert held(engine) == 0


def test_what_storage_does_not_take_stays_until_room_is_needed() -> None:
    class FullStore(MemoryStore):
        def put(self, keys: Any, headers: Any, blobs: Any) -> list[bool]:
            return [False] * len(keys)

    with engine_with(FullStore()) as engine:
        engine.run(PROMPTS[0])
        assert held(engine) == PAGES
        engine.cache.evict("device", 24)
        assert engine.run(PROMPTS[0])["host"] == PAGES * PAGE_TOKENS
        for prompt in PROMPTS:
            engine.run(prompt)
        assert held(engine) <= 8


def test_many_threads_and_few_host_pages_leave_none_behind() -> None:
    store = MemoryStore()
    with engine_with(store, device_pages=64, host_pages=10, eviction="slru") as engine:

        def work(first: int) -> None:
            for i in range(40):
                prompt = PROMPTS[(first * 5 + i * 7) % len(PROMPTS)]
                with engine.cache.acquire(engine.cache.match(prompt)) as lease:
                    if engine.wrong_pages(prompt, lease.device_pages):
                        wrong.append(prompt[0])

        wrong: list[int] = []
        for prompt in PROMPTS:
            engine.run(prompt)
            assert engine.cache.flush(DEADLINE_S)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not wrong
        assert held(engine) == 0


def test_late_pages_that_nobody_waits_for_go_at_once() -> None:
    geometry = tiny_geometry()
    plane = ControlPlane(
        geometry.groups[0],
        Directory({Tier.HOST: 8}),
        WritePolicy.parse("write_through", device_owned=False),
        device_owned=False,
        has_storage=True,
        host_retain=0,
        clock=lambda: 0.0,
    )
    space, keys = plane.space(namespace(geometry)), chain_hashes(PROMPTS[0], PAGE_TOKENS)
    plane.directory.set_stored(space, keys, True, start=0)
    for stays in (True, False):
        job = plane.prefetch(space, keys, 0, PAGES)
        assert job is not None
        assert job.kind is JobKind.PREFETCH
        pins = plane.pins()
        plane.flights.join(job.id, pins)
        if not stays:
            plane.flights.leave(job.id, pins)
        plane.complete(Completion(job.id, 0))
        assert plane.directory.stats().tiers["host"].ready_pages == (PAGES if stays else 0)
        pins.release()
        assert plane.directory.stats().tiers["host"].ready_pages == 0
        plane.audit()
    assert plane.prefetch_stats().useless_pages == 2 * PAGES


def test_what_cannot_work_is_refused() -> None:
    for wrong in (1, -1, True, False, "0"):
        with pytest.raises(ConfigError, match="None or 0"):
            CacheConfig(host_retain=wrong)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="best_effort"):
        CacheConfig(host_retain=0, prefetch_policy="best_effort")
    with pytest.raises(ConfigError, match="none that is written"):
        engine_with(None)


def test_a_read_only_store_is_refused(tmp_path: Any) -> None:
    TinyEngine(device_pages=8, host_pages=8, store=f"file:{tmp_path}/store").cache.close()
    with pytest.raises(ConfigError, match="none that is written"):
        engine_with(f"file:{tmp_path}/store?read_only=true")
