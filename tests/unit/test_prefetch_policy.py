"""How long a request waits for pages from storage, and what becomes of those that it does not wait for."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support import PAGE_TOKENS, TinyEngine

from kvhoist.acquire import Acquisition
from kvhoist.config import CacheConfig
from kvhoist.control.prefetch_policy import PrefetchPolicy
from kvhoist.errors import ConfigError, PolicyError
from kvhoist.messages import StorageKey
from kvhoist.storage import Buffer, MemoryStore

DEADLINE_S = 20
PROMPT = list(range(10 * PAGE_TOKENS + 1))


class GatedStore(MemoryStore):
    """A store whose reads wait for `gate`."""

    def __init__(self) -> None:
        super().__init__("8MiB")
        self.gate = threading.Event()
        self.gate.set()
        self.num_read = 0

    def get(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[bytes | None]:
        assert self.gate.wait(DEADLINE_S)
        self.num_read += len(keys)
        return super().get(keys, blobs)


@pytest.fixture
def store() -> Iterator[GatedStore]:
    """A store that holds PROMPT's pages and does not answer reads yet."""
    made = GatedStore()
    with TinyEngine(device_pages=12, host_pages=12, store=made) as engine:
        engine.run(PROMPT)
        assert engine.cache.flush(DEADLINE_S)
    made.gate.clear()
    yield made
    made.gate.set()


def engine_with(store: GatedStore, **options: Any) -> TinyEngine:
    return TinyEngine(device_pages=24, host_pages=24, store=store, config=CacheConfig(io_threads=1, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch_policy": "best_effort"},
        {"prefetch_timeout_s": 0.05},
        {"prefetch_timeout_s": 0, "prefetch_timeout_per_page_s": 0.005},
    ],
)
def test_what_is_late_is_computed_and_given_back(store: GatedStore, options: dict[str, Any]) -> None:
    with engine_with(store, **options) as engine:
        began = time.monotonic()
        assert sum(engine.run(PROMPT).values()) == 0
        assert time.monotonic() - began < DEADLINE_S / 2, "it waited for storage"
        store.gate.set()
        assert engine.cache.flush(DEADLINE_S)
        assert engine.run(PROMPT)["device"] == 10 * PAGE_TOKENS


def test_pages_that_nobody_waits_for_are_not_read(store: GatedStore) -> None:
    """One read may have begun; what waits behind it is taken back."""
    other = [7, *PROMPT]
    with TinyEngine(device_pages=12, host_pages=12, store=store) as engine:
        engine.run(other)
        assert engine.cache.flush(DEADLINE_S)
    with engine_with(store, prefetch_timeout_s=0.02) as engine:
        found = [engine.cache.match(prompt).num_pages for prompt in (PROMPT, other)]  # before the one thread is held
        assert found == [10, 10]
        for prompt in (PROMPT, other):
            assert sum(engine.run(prompt).values()) == 0
        store.gate.set()
        assert engine.cache.flush(DEADLINE_S)
        stats = engine.cache.stats().storage
        assert stats is not None
        assert stats.cancelled_pages >= 10
        assert stats.cancelled_pages + store.num_read == 20


def test_what_best_effort_does_not_wait_for_is_there_for_the_next_request(store: GatedStore) -> None:
    with engine_with(store, prefetch_policy="best_effort") as engine:
        assert sum(engine.run(PROMPT).values()) == 0
        store.gate.set()
        assert engine.cache.flush(DEADLINE_S)
        engine.cache.evict("device", 24)
        assert engine.run(PROMPT)["host"] == 10 * PAGE_TOKENS
        assert engine.cache.stats().prefetches.by_outcome() == {
            "asked": 10, "hit": 10, "late": 10, "cancelled": 0, "useless": 0
        }  # fmt: skip
        engine.cache.audit()


def test_wait_complete_waits(store: GatedStore) -> None:
    with engine_with(store, prefetch_policy="wait_complete", prefetch_timeout_s=0) as engine:
        opener = threading.Timer(0.3, store.gate.set)
        opener.start()
        assert engine.run(PROMPT)["storage"] == 10 * PAGE_TOKENS
        opener.join()


def test_another_request_that_waits_keeps_its_pages_coming(store: GatedStore) -> None:
    with engine_with(store, prefetch_policy="wait_complete") as engine:
        patient = engine.cache.match(PROMPT, max_tokens=len(PROMPT) - 1)
        found: list[int] = []

        def wait() -> None:
            with engine.cache.acquire(patient) as lease:
                found.append(lease.num_tokens)

        waiter = threading.Thread(target=wait)
        waiter.start()
        impatient = engine.cache.match(PROMPT, max_tokens=len(PROMPT) - 1)
        with engine.cache.acquire(impatient, timeout_s=0.05) as lease:
            assert lease.num_tokens == 0
        store.gate.set()
        waiter.join(DEADLINE_S)
        assert found == [10 * PAGE_TOKENS]


def test_what_the_host_tier_has_is_loaded_though_the_rest_is_late(store: GatedStore) -> None:
    config = CacheConfig(prefetch_policy="best_effort")
    with TinyEngine(device_pages=12, host_pages=40, store=store, config=config) as engine:
        store.gate.set()
        engine.run([*PROMPT[: 4 * PAGE_TOKENS], 1])
        assert engine.cache.flush(DEADLINE_S)
        store.gate.clear()
        engine.cache.evict("device", 12)
        assert engine.run(PROMPT) == {"device": 0, "host": 4 * PAGE_TOKENS, "storage": 0}
        store.gate.set()


@pytest.mark.parametrize(
    ("name", "limit_s"), [("best_effort", 0.0), ("wait_complete", math.inf), ("timeout", 2.0 + 3 * 0.5)]
)
def test_the_limit_of_each_policy(name: str, limit_s: float) -> None:
    assert PrefetchPolicy.parse(name, 2, 0.5).limit_s(3) == limit_s


def test_a_policy_that_cannot_be_is_refused() -> None:
    with pytest.raises(PolicyError, match="wait_complete"):
        CacheConfig(prefetch_policy="never")
    with pytest.raises(ConfigError, match="prefetch_timeout_per_page_s"):
        CacheConfig(prefetch_timeout_per_page_s=-1)


@pytest.mark.parametrize("where", ["prefetch", "give_up", "cancel"])
def test_page_ids_come_back_where_an_acquire_fails_in_the_middle(
    store: GatedStore, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    with engine_with(store, prefetch_timeout_s=0.02) as engine:
        binding = engine.cache._binding
        owner = {"prefetch": binding.plane, "give_up": Acquisition, "cancel": binding.mover}[where]
        match = engine.cache.match(PROMPT, max_tokens=len(PROMPT) - 1)
        with monkeypatch.context() as planted:
            planted.setattr(owner, where, fail)
            with pytest.raises(RuntimeError, match="planted"):
                engine.cache.acquire(match)
        store.gate.set()
        assert engine.cache.flush(DEADLINE_S)
        engine.cache.audit()
        engine.run(PROMPT)
        assert engine.run(PROMPT)["device"] == 10 * PAGE_TOKENS
