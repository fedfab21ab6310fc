"""The facade over real tiers: what comes back is what was computed, whatever was evicted, failed or restarted."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PAGE_TOKENS, TinyEngine, namespace, tiny_geometry

from kvhoist.cache import HierarchicalCache
from kvhoist.config import CacheConfig
from kvhoist.copy.reference import BoundPlan
from kvhoist.errors import (
    ClosedError,
    ConfigError,
    GeometryError,
    HostMemoryError,
    PolicyError,
    TokenError,
    TransferError,
)
from kvhoist.geometry import CacheGeometry
from kvhoist.platform.cpu import CpuEvent
from kvhoist.storage.memory import MemoryStore

LONG = list(range(100, 100 + 10 * PAGE_TOKENS))
OTHER = list(range(500, 500 + 10 * PAGE_TOKENS))
PROMPT = [*LONG, 7]


def settle(engine: TinyEngine) -> None:
    assert engine.cache.flush(30.0)


def test_a_prefix_on_the_device_is_used_where_it_lies():
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        assert engine.run(PROMPT) == {"device": 0, "host": 0, "storage": 0}
        assert engine.run(PROMPT) == {"device": 40, "host": 0, "storage": 0}


def test_the_last_token_of_a_fully_cached_prompt_is_still_computed():
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        engine.run(LONG)
        assert engine.run(LONG)["device"] == len(LONG) - PAGE_TOKENS


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_what_the_device_gave_up_comes_back_from_the_host_byte_for_byte(blocks):
    with TinyEngine(device_pages=12, host_pages=40, blocks=blocks) as engine:
        engine.run(PROMPT)
        engine.run(OTHER)
        settle(engine)
        engine.cache.evict("device", 12)
        engine.scribble()
        assert engine.run(PROMPT) == {"device": 0, "host": 40, "storage": 0}


def test_after_a_restart_the_prefix_comes_from_disk_byte_for_byte(tmp_path: Path):
    address = f"file:{tmp_path / 'kv'}?capacity=64MiB"
    with TinyEngine(device_pages=12, host_pages=16, store=address) as engine:
        engine.run(PROMPT)
    with TinyEngine(device_pages=12, host_pages=16, store=address) as engine:
        engine.scribble()
        assert engine.run(PROMPT) == {"device": 0, "host": 0, "storage": 40}
        assert engine.run(PROMPT) == {"device": 40, "host": 0, "storage": 0}


def test_a_prefix_longer_than_the_host_tier_is_served_as_far_as_it_fits(tmp_path: Path):
    store = MemoryStore("8MiB")
    with TinyEngine(device_pages=12, host_pages=12, store=store) as engine:
        engine.run(PROMPT)
    with TinyEngine(device_pages=12, host_pages=4, store=store) as engine:
        assert engine.run(PROMPT)["storage"] >= 4 * PAGE_TOKENS


def test_write_through_with_a_host_tier_smaller_than_the_device_keeps_caching():
    with TinyEngine(device_pages=24, host_pages=4) as engine:
        for first in range(0, 4000, 100):
            engine.run(list(range(first, first + 4 * PAGE_TOKENS + 1)))
            settle(engine)
        engine.cache.evict("device", 24)
        engine.scribble()
        assert engine.run(list(range(3900, 3900 + 4 * PAGE_TOKENS + 1)))["host"] == 4 * PAGE_TOKENS


def test_other_salt_other_namespace_other_tokens_are_misses():
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        engine.run(PROMPT)
        cache = engine.cache
        assert cache.match(PROMPT, salt=b"tenant").num_pages == 0
        assert cache.match(PROMPT, extras={0: b"image"}).num_pages == 0
        assert cache.match(PROMPT, namespace=namespace(engine.geometry, weights_id="w2")).num_pages == 0
        assert cache.match([1, *PROMPT]).num_pages == 0
        assert cache.match(PROMPT, extras={5: b"image"}).num_pages == 5


def test_explain_says_which_field_of_the_namespace_differs_even_after_a_restart(tmp_path: Path):
    address = f"file:{tmp_path}?capacity=64MiB"
    with TinyEngine(device_pages=16, host_pages=16, store=address) as engine:
        engine.run(PROMPT)
    with TinyEngine(device_pages=16, host_pages=16, store=address) as engine:
        cache = engine.cache
        other = namespace(engine.geometry, weights_id="w2")
        explanation = cache.explain(PROMPT, namespace=other)
        assert explanation.miss is not None
        assert explanation.miss.fields == ("weights_id",)
        here = cache.explain(PROMPT)
        assert here.num_hit_pages == 10
        assert [state.tiers for state in here.pages] == [("storage",)] * 10
        assert here.remainder_tokens == 1
        assert "never seen" in str(cache.explain([*OTHER, 7]))


# -- write policies ------------------------------------------------------------------------------------------------


def test_write_back_offloads_what_the_device_gives_up_and_nothing_before():
    with TinyEngine(device_pages=10, host_pages=40, config=CacheConfig(write_policy="write_back")) as engine:
        engine.run(PROMPT)
        assert engine.cache.stats().jobs["offload"]["pages"] == 0
        engine.run([*OTHER, 7])
        assert engine.cache.stats().jobs["offload"]["pages"] == 10
        engine.scribble()
        assert engine.run(PROMPT)["host"] == 40


def test_write_back_reaches_the_store_at_close(tmp_path: Path):
    address = f"file:{tmp_path}?capacity=64MiB"
    config = CacheConfig(write_policy="write_back")
    with TinyEngine(device_pages=16, host_pages=40, store=address, config=config) as engine:
        engine.run(PROMPT)
    with TinyEngine(device_pages=16, host_pages=40, store=address, config=config) as engine:
        assert engine.run(PROMPT)["storage"] == 40


def test_write_through_selective_offloads_after_the_hits_asked_for():
    config = CacheConfig(write_policy="write_through_selective", min_hits=2)
    with TinyEngine(device_pages=16, host_pages=16, config=config) as engine:
        offloaded = []
        for _ in range(4):
            engine.run(PROMPT)
            settle(engine)
            offloaded.append(engine.cache.stats().jobs["offload"]["pages"])
        assert offloaded == [0, 0, 10, 10]
        engine.run([*OTHER, 7])
        engine.cache.evict("device", 16)
        assert "waits for 2 hits" in str(engine.cache.explain([*OTHER, 7]))


# -- failures ------------------------------------------------------------------------------------------------------


class Switch:
    """Makes the copies of one direction fail, or wait, on demand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, destination: str) -> None:
        self.fail = False
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        real = BoundPlan.copy

        def copy(plan: BoundPlan, src: Any, dst: Any) -> int:
            if plan.plan.dst.name == destination:
                self.started.set()
                assert self.gate.wait(30)
                if self.fail:
                    raise RuntimeError("planted")
            return real(plan, src, dst)

        monkeypatch.setattr(BoundPlan, "copy", copy)


def test_a_failed_offload_is_never_visible_and_returns_its_pages(monkeypatch):
    switch = Switch(monkeypatch, "page_first_direct")
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        switch.fail = True
        engine.run(PROMPT)
        settle(engine)
        stats = engine.cache.stats()
        assert stats.jobs["offload"]["failed_pages"] == 10
        engine.cache.evict("device", 16)
        assert engine.cache.match(PROMPT).num_pages == 0
        assert "planted" in str(engine.cache.explain(PROMPT))
        switch.fail = False
        engine.run(PROMPT)
        settle(engine)
        engine.cache.evict("device", 16)
        assert engine.run(PROMPT)["host"] == 40


def test_pages_for_which_the_host_had_no_room_are_offloaded_at_their_next_hit(monkeypatch):
    switch = Switch(monkeypatch, "page_first_direct")
    with TinyEngine(device_pages=24, host_pages=10) as engine:
        switch.gate.clear()
        engine.run([*OTHER, 7])
        engine.run(PROMPT)
        switch.gate.set()
        settle(engine)
        assert engine.cache.stats().jobs["offload"]["pages"] == 10
        engine.run(PROMPT)
        settle(engine)
        engine.cache.evict("device", 24)
        assert engine.run(PROMPT)["host"] == 40


def test_a_failed_load_is_recomputed(monkeypatch):
    switch = Switch(monkeypatch, "device")
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        engine.run(PROMPT)
        settle(engine)
        engine.cache.evict("device", 16)
        engine.scribble()
        switch.fail = True
        assert engine.run(PROMPT) == {"device": 0, "host": 0, "storage": 0}
        switch.fail = False
        assert engine.run(PROMPT)["device"] == 40


def test_a_load_under_way_keeps_both_ends(monkeypatch):
    switch = Switch(monkeypatch, "device")
    with TinyEngine(device_pages=24, host_pages=12) as engine:
        engine.run(PROMPT)
        settle(engine)
        engine.cache.evict("device", 24)
        engine.scribble()
        switch.gate.clear()
        switch.started.clear()
        outcome: list[dict[str, int]] = []
        reader = threading.Thread(target=lambda: outcome.append(engine.run(PROMPT)))
        reader.start()
        assert switch.started.wait(30)
        for first in range(1000, 3000, 100):
            engine.run(list(range(first, first + 6 * PAGE_TOKENS + 1)), check=False)
        assert engine.cache.evict("host", 12) <= 2, "the load's source may not be evicted"
        switch.gate.set()
        reader.join(30)
        assert outcome == [{"device": 0, "host": 40, "storage": 0}]


def test_many_requests_for_one_prefix_share_its_load(monkeypatch):
    switch = Switch(monkeypatch, "device")
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        engine.run(PROMPT)
        settle(engine)
        engine.cache.evict("device", 16)
        engine.scribble()
        switch.gate.clear()
        outcomes: list[dict[str, int]] = []
        readers = [threading.Thread(target=lambda: outcomes.append(engine.run(PROMPT))) for _ in range(6)]
        for reader in readers:
            reader.start()
        switch.gate.set()
        for reader in readers:
            reader.join(30)
        assert len(outcomes) == 6
        assert all(sum(outcome.values()) == 40 for outcome in outcomes)
        assert engine.cache.stats().jobs["load"]["pages"] == 10


def test_an_acquire_that_is_late_is_recomputed_and_leaks_nothing(monkeypatch):
    switch = Switch(monkeypatch, "device")
    with TinyEngine(device_pages=24, host_pages=16) as engine:
        engine.run(PROMPT)
        settle(engine)
        engine.cache.evict("device", 24)
        switch.gate.clear()
        match = engine.cache.match(PROMPT)
        with engine.cache.acquire(match, timeout_s=0.05) as lease:
            assert lease.num_pages == 0
            switch.gate.set()
        settle(engine)
        engine.cache.audit()
        assert engine.cache.evict("device", 24) == 10, "no pin may be left"


def test_a_layerwise_lease_can_be_read_layer_by_layer():
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        engine.run(PROMPT)
        settle(engine)
        engine.cache.evict("device", 16)
        engine.scribble()
        with engine.cache.acquire(engine.cache.match(PROMPT), layerwise=True) as lease:
            for layer in range(3):
                lease.wait(layer, timeout_s=30)
            lease.wait(timeout_s=30)
            assert lease.num_pages == 10
            engine.check(PROMPT, lease)


def test_a_reservation_left_without_commit_is_invisible_and_returned():
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        with engine.cache.reserve(PROMPT) as reservation:
            assert len(reservation.device_pages) == 10
            assert engine.cache.match(PROMPT).num_pages == 0
        assert engine.cache.match(PROMPT).num_pages == 0
        with pytest.raises(ClosedError):
            reservation.commit()
        assert len(engine.cache.reserve(list(range(16 * PAGE_TOKENS))).device_pages) == 16


def test_two_requests_that_compute_the_same_pages_do_not_write_twice():
    with (
        TinyEngine(device_pages=16, host_pages=16) as engine,
        engine.cache.reserve(PROMPT) as first,
        engine.cache.reserve(PROMPT) as second,
    ):
        assert len(first.device_pages) == 10
        assert second.device_pages == []
        second.commit()
        first.commit()


# -- storage that misbehaves ---------------------------------------------------------------------------------------


class BadStore(MemoryStore):
    """A store whose calls fail, hang or lie on demand."""

    def __init__(self) -> None:
        super().__init__("8MiB")
        self.fail: type[BaseException] | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.flip = False

    def _misbehave(self) -> None:
        self.gate.wait(60)
        if self.fail is not None:
            raise self.fail("planted")

    def put(self, *args: Any) -> list[bool]:
        self._misbehave()
        return super().put(*args)

    def get(self, keys: Any, blobs: Any) -> list[bytes | None]:
        self._misbehave()
        headers = super().get(keys, blobs)
        if self.flip:
            for blob in blobs:
                blob[5] ^= 1
        return headers

    def exists(self, keys: Any) -> list[bool]:
        self._misbehave()
        return super().exists(keys)


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt, SystemExit])
def test_a_store_that_fails_costs_hits_and_nothing_else(error):
    store = BadStore()
    store.fail = error
    with TinyEngine(device_pages=12, host_pages=12, store=store) as engine:
        engine.run(PROMPT)
        settle(engine)
        assert engine.run(PROMPT)["device"] == 40
        store.fail = None
        deadline = time.monotonic() + 20
        for first in itertools.count(1000, 50):
            engine.run(list(range(first, first + 41)))
            settle(engine)
            if store.stats().num_pages >= 10:
                return
            assert time.monotonic() < deadline, "it was fenced off for a while, and is still"


def test_pages_that_the_store_flipped_are_recomputed_and_counted():
    store = BadStore()
    with TinyEngine(device_pages=12, host_pages=12, store=store) as engine:
        engine.run(PROMPT)
    store.flip = True
    with TinyEngine(device_pages=12, host_pages=12, store=store) as engine:
        assert sum(engine.run(PROMPT).values()) == 0
        stats = engine.cache.stats()
        assert stats.storage is not None
        assert stats.storage.corrupt_pages == 10


def test_a_hung_store_does_not_hang_the_engine_or_its_close():
    store = BadStore()
    config = CacheConfig(lookup_timeout_s=0.05, max_queued_pages=4)
    engine = TinyEngine(device_pages=16, host_pages=16, store=store, config=config)
    store.gate.clear()
    for first in range(0, 2000, 100):
        engine.run(list(range(first, first + 4 * PAGE_TOKENS + 1)))
    assert engine.run(list(range(1900, 1900 + 4 * PAGE_TOKENS + 1)))["device"] == 4 * PAGE_TOKENS
    report = engine.cache.close(timeout_s=0.2)
    assert report.unfinished_pages > 0
    assert report.memory_kept
    store.gate.set()


# -- oracles and their negative controls ---------------------------------------------------------------------------


def corrupt_host(engine: TinyEngine) -> None:
    arena = engine.cache._binding.arena
    for page in range(arena.num_pages):
        arena.page(page)[3] ^= 0xFF


def test_the_byte_check_sees_a_corrupted_host_page():
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        engine.run(PROMPT)
        settle(engine)
        engine.cache.evict("device", 16)
        corrupt_host(engine)
        with pytest.raises(AssertionError, match="hold other bytes"):
            engine.run(PROMPT)


def test_debug_verify_turns_a_corrupted_host_page_into_a_miss():
    with TinyEngine(device_pages=16, host_pages=16, config=CacheConfig(debug_verify=True)) as engine:
        engine.run(PROMPT)
        settle(engine)
        engine.cache.evict("device", 16)
        engine.scribble()
        assert engine.run(PROMPT)["host"] == 40
        assert engine.cache.stats().num_mismatches == 0
        engine.cache.evict("device", 16)
        corrupt_host(engine)
        assert sum(engine.run(PROMPT).values()) == 0
        assert engine.cache.stats().num_mismatches == 10


@pytest.mark.parametrize("policy", ["write_through", "write_back", "write_through_selective"])
@pytest.mark.parametrize("eviction", ["lru", "slru", "lfu", "arc"])
def test_threads_that_share_prefixes_always_read_right_bytes(policy, eviction, tmp_path: Path):
    config = CacheConfig(write_policy=policy, eviction=eviction, debug_verify=True, min_hits=1)
    address = f"file:{tmp_path}?capacity=1MiB"
    with TinyEngine(device_pages=40, host_pages=24, store=address, config=config) as engine:
        problems: list[BaseException] = []

        def converse(seed: int) -> None:
            draw = np.random.default_rng(seed)
            try:
                for _ in range(25):
                    topic = int(draw.integers(4)) * 1000
                    length = int(draw.integers(1, 30))
                    tail = [] if draw.random() < 0.5 else [int(draw.integers(10, 20))] * 6
                    engine.run([*range(topic, topic + length), *tail, 1])
                    if draw.random() < 0.1:
                        engine.cache.evict("host", 5)
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=converse, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not problems, problems[0]
        for _ in range(3):
            engine.run(PROMPT)
            settle(engine)
        engine.cache.evict("device", 40)
        assert engine.run(PROMPT)["device"] == 0
        settle(engine)
        stats = engine.cache.stats()
        assert stats.num_mismatches == 0
        assert stats.jobs["load"]["pages"] > 0


# -- pins, eviction, clear, close ----------------------------------------------------------------------------------


def test_pinned_pages_outlive_every_eviction():
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        engine.run(PROMPT)
        settle(engine)
        pins = engine.cache.pin(engine.cache.match(PROMPT))
        assert engine.cache.evict("device", 16) == 0
        assert engine.cache.evict("host", 16) == 0
        engine.cache.unpin(pins)
        engine.cache.unpin(pins)
        assert engine.cache.evict("device", 16) == 10
        assert engine.cache.evict("host", 16) == 10


def test_clear_forgets_one_namespace_and_pages_in_use_when_they_are_given_back():
    with TinyEngine(device_pages=32, host_pages=32) as engine:
        engine.run(PROMPT)
        settle(engine)
        other = namespace(engine.geometry, weights_id="w2")
        with engine.cache.reserve(OTHER, namespace=other) as reservation:
            reservation.commit()
        settle(engine)
        with engine.cache.acquire(engine.cache.match(PROMPT)) as lease:
            engine.cache.clear(engine.cache.namespace)
            engine.check(PROMPT, lease)
            assert engine.cache.match(PROMPT).num_pages == 0
        assert engine.cache.match(OTHER, namespace=other).num_pages == 10
        engine.cache.audit()
        assert engine.cache.clear() > 0
        assert engine.cache.evict("device", 32) == 0


def test_clear_with_storage_removes_the_pages_from_disk(tmp_path: Path):
    address = f"file:{tmp_path}?capacity=64MiB"
    with TinyEngine(device_pages=16, host_pages=16, store=address) as engine:
        engine.run(PROMPT)
        settle(engine)
        engine.cache.clear(storage=True)
        assert engine.cache.match(PROMPT).num_pages == 0
    with TinyEngine(device_pages=16, host_pages=16, store=address) as engine:
        assert engine.cache.match(PROMPT).num_pages == 0


def test_the_secret_of_the_environment_signs_and_pages_without_it_are_refused(monkeypatch):
    store = MemoryStore("8MiB")
    with TinyEngine(device_pages=16, host_pages=16, store=store) as engine:
        engine.run(PROMPT)
    monkeypatch.setenv("KVHOIST_STORE_SECRET", "sixteen bytes or more")
    with TinyEngine(device_pages=16, host_pages=16, store=store) as engine:
        assert sum(engine.run(PROMPT).values()) == 0, "these pages are not signed"
    with TinyEngine(device_pages=16, host_pages=16, store=store) as engine:
        assert engine.run(PROMPT)["storage"] == 40


def test_use_after_close_is_refused_and_close_is_idempotent():
    engine = TinyEngine(device_pages=16, host_pages=16)
    engine.run(PROMPT)
    report = engine.cache.close()
    assert (report.unfinished_jobs, report.memory_kept) == (0, False)
    assert engine.cache.close() is report
    for use in (
        lambda: engine.cache.match(PROMPT),
        lambda: engine.cache.reserve(PROMPT),
        lambda: engine.cache.evict("host", 1),
        lambda: engine.cache.clear(),
    ):
        with pytest.raises(ClosedError):
            use()


def test_close_without_drain_cancels_and_accounts(monkeypatch):
    switch = Switch(monkeypatch, "page_first_direct")
    engine = TinyEngine(device_pages=16, host_pages=16)
    switch.gate.clear()
    engine.run(PROMPT)
    closer = threading.Thread(target=engine.cache.close, kwargs={"drain": False})
    closer.start()
    switch.gate.set()
    closer.join(30)
    assert not closer.is_alive()
    engine.cache.audit()


# -- a foreign device ----------------------------------------------------------------------------------------------


def foreign(**kwargs: Any) -> TinyEngine:
    return TinyEngine(device_pages=24, host_pages=16, config=CacheConfig(device_owned=False), **kwargs)


def test_a_foreign_engine_names_its_own_blocks():
    with foreign(blocks=2) as engine:
        match = engine.cache.match(LONG)
        pages = [11, 3, 7, 0, 15, 2, 9, 20, 5, 1]
        for index, page in enumerate(pages):
            engine.compute(LONG, index, page)
        blocks = [block for page in pages for block in (2 * page, 2 * page + 1)]
        offload = engine.cache.write(match, blocks)
        assert offload is not None
        offload.wait(timeout_s=30)
        engine.scribble()
        elsewhere = [4, 18, 6, 22, 8, 12, 10, 14, 13, 16]
        load = engine.cache.load(
            engine.cache.match(LONG), [block for page in elsewhere for block in (2 * page, 2 * page + 1)]
        )
        assert load is not None
        for layer in range(3):
            load.wait(layer, timeout_s=30)
        load.wait(timeout_s=30)
        assert engine.wrong_pages(LONG, elsewhere) == []


def test_an_offload_waits_for_the_producer():
    with foreign() as engine:
        produced = CpuEvent()
        offload = engine.cache.write(engine.cache.match(LONG), list(range(10)), after=produced)
        assert offload is not None
        with pytest.raises(TimeoutError):
            offload.wait(timeout_s=0.05)
        for index in range(10):
            engine.compute(LONG, index, index)
        produced.set()
        offload.wait(timeout_s=30)
        engine.scribble()
        load = engine.cache.load(engine.cache.match(LONG), list(range(10, 20)))
        assert load is not None
        load.wait(timeout_s=30)
        assert engine.wrong_pages(LONG, list(range(10, 20))) == []


def test_a_failed_load_tells_its_caller(monkeypatch):
    switch = Switch(monkeypatch, "device")
    with foreign() as engine:
        offload = engine.cache.write(engine.cache.match(LONG), list(range(10)))
        assert offload is not None
        offload.wait(timeout_s=30)
        switch.fail = True
        load = engine.cache.load(engine.cache.match(LONG), list(range(10)))
        assert load is not None
        with pytest.raises(TransferError, match="10 of 10 pages failed: RuntimeError: planted"):
            load.wait(timeout_s=30)


@pytest.mark.parametrize("blocks", [[1], [0, 1, 2], [0, 0], [-1, 0], [0, 48], list(range(22))])
@pytest.mark.parametrize("use", ["write", "offload", "load"])
def test_blocks_that_cannot_hold_the_pages_are_refused_before_anything_moves(use, blocks):
    with foreign(blocks=2) as engine:
        match = engine.cache.match(LONG)
        with pytest.raises(ConfigError, match="these device blocks cannot hold pages of the match"):
            getattr(engine.cache, use)(match, blocks)
        assert engine.cache.stats().directory.entries == 0


def test_an_owned_devices_blocks_are_not_for_callers_to_name():
    with TinyEngine(device_pages=8, host_pages=8) as engine, pytest.raises(PolicyError, match="gives out the blocks"):
        engine.cache.load(engine.cache.match(LONG), [0])


@pytest.mark.parametrize("use", ["acquire", "reserve", "evict"])
def test_owned_operations_on_a_foreign_device_are_refused(use):
    with foreign() as engine:
        call = {
            "acquire": lambda: engine.cache.acquire(engine.cache.match(LONG)),
            "reserve": lambda: engine.cache.reserve(LONG),
            "evict": lambda: engine.cache.evict("device", 1),
        }[use]
        with pytest.raises(PolicyError, match="needs a device tier that kvhoist owns"):
            call()


def test_kvhoist_disable_turns_all_off(monkeypatch):
    monkeypatch.setenv("KVHOIST_DISABLE", "1")
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        for _ in range(2):
            assert sum(engine.run(PROMPT).values()) == 0
        assert engine.cache.stats().directory.entries == 0
        assert "KVHOIST_DISABLE is set" in str(engine.cache.explain(PROMPT))
    with foreign() as engine:
        assert engine.cache.write(engine.cache.match(LONG), list(range(10))) is None


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"write_policy": "write_around"}, PolicyError, "write_through_selective"),
        ({"write_policy": "write_back", "device_owned": False}, PolicyError, "needs a device tier that kvhoist owns"),
        ({"eviction": "random"}, PolicyError, "lru"),
        ({"write_policy": "write_through_selective", "min_hits": 0}, PolicyError, "min_hits"),
        ({"io_backend": "staged"}, ConfigError, "does not run on the cpu platform"),
        ({"io_backend": "warp"}, ConfigError, "unknown copy engine"),
    ],
)
def test_an_option_that_cannot_work_is_refused_before_anything_is_built(config, error, message):
    before = threading.active_count()
    with pytest.raises(error, match=message):
        TinyEngine(device_pages=4, host_pages=4, config=CacheConfig(**config))
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "options",
    [{"lookup_timeout_s": -1}, {"acquire_timeout_s": float("nan")}, {"max_queued_pages": 0}, {"history_pages": -1}],
)
def test_a_config_that_cannot_work_is_refused_at_construction(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        CacheConfig(**options)


def test_a_host_tier_that_does_not_fit_the_machine_is_refused():
    with pytest.raises(HostMemoryError):
        TinyEngine(device_pages=4, host_pages=1 << 40)


def test_a_geometry_that_does_not_match_the_tensors_is_refused():
    with TinyEngine(device_pages=4, host_pages=4) as engine:
        other = CacheGeometry.attention(2, k_row_bytes=32, v_row_bytes=32, page_tokens=PAGE_TOKENS)
        with pytest.raises(GeometryError, match="not of this geometry"):
            HierarchicalCache(other, namespace(other), device=engine.device, host_bytes="1MiB")


@pytest.mark.parametrize("tokens", [[1, -2], [1 << 40], [1.5], ["a"], [True]])
def test_a_token_that_cannot_be_one_is_refused(tokens):
    with TinyEngine(device_pages=4, host_pages=4) as engine, pytest.raises(TokenError):
        engine.cache.match(tokens * PAGE_TOKENS)


def test_the_secret_of_a_store_is_not_printed():
    assert "hush" not in repr(CacheConfig(store_secret=b"hush"))


def test_the_bytes_of_a_page_do_not_depend_on_blocks_per_page():
    assert tiny_geometry(1).describe() == tiny_geometry(4).describe()
