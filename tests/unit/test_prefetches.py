"""What prefetches were good for, in the library: hits, pages that came late, that were cancelled, that were useless."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from mover_support import until
from support import PAGE_TOKENS, TinyEngine

from kvhoist import acquire
from kvhoist.config import CacheConfig
from kvhoist.lease import Match
from kvhoist.messages import StorageKey
from kvhoist.storage import Buffer, MemoryStore
from kvhoist.transfer import Transfer

DEADLINE_S = 20
PROMPT = list(range(10 * PAGE_TOKENS + 1))
OTHER = [7, *PROMPT]


class GatedStore(MemoryStore):
    """A store whose reads wait for `gate`."""

    def __init__(self) -> None:
        super().__init__("8MiB")
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def get(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[bytes | None]:
        self.entered.release()
        assert self.gate.wait(DEADLINE_S)
        return super().get(keys, blobs)


@pytest.fixture
def store() -> Iterator[GatedStore]:
    """A store that holds the pages of PROMPT and OTHER."""
    made = GatedStore()
    with TinyEngine(device_pages=24, host_pages=24, store=made) as engine:
        for prompt in (PROMPT, OTHER):
            engine.run(prompt)
        assert engine.cache.flush(DEADLINE_S)
    yield made
    made.gate.set()


def engine_with(store: GatedStore, host_pages: int = 24, **options: Any) -> TinyEngine:
    config = CacheConfig(io_threads=1, **options)
    return TinyEngine(device_pages=24, host_pages=host_pages, store=store, config=config)


def counted(engine: TinyEngine) -> dict[str, int]:
    return {name: pages for name, pages in engine.cache.stats().prefetches.by_outcome().items() if pages}


def match_of(engine: TinyEngine, prompt: list[int]) -> Match:
    return engine.cache.match(prompt, max_tokens=len(prompt) - 1)


def test_pages_that_were_loaded_are_hits_once(store: GatedStore) -> None:
    with engine_with(store) as engine:
        for _ in range(3):
            engine.run(PROMPT)
        engine.cache.evict("device", 24)
        engine.run(PROMPT)
        assert counted(engine) == {"asked": 10, "hit": 10}
        assert engine.cache.stats().prefetches.page_bytes == engine.geometry.groups[0].page_bytes


def test_pages_that_left_without_a_load_are_useless(store: GatedStore) -> None:
    with engine_with(store) as engine:
        coming = engine.cache.prefetch(match_of(engine, PROMPT))
        assert coming is not None
        coming.wait(timeout_s=DEADLINE_S)
        assert counted(engine) == {"asked": 10}
        assert engine.cache.evict("host", 4) == 4
        assert counted(engine) == {"asked": 10, "useless": 4}
        assert engine.cache.clear() == 6
        assert counted(engine) == {"asked": 10, "useless": 10}


def go_on_without(engine: TinyEngine, match: Match, store: GatedStore) -> None:
    """Acquire a match whose pages are late as soon as the store reads the first of them."""

    def first_late(waits: Sequence[Transfer], *_: object) -> Transfer:
        assert store.entered.acquire(timeout=DEADLINE_S)
        return waits[0]

    with mock.patch.object(acquire, "_first_late", first_late), engine.cache.acquire(match) as lease:
        assert lease.num_tokens == 0


def test_pages_that_come_after_their_request_went_on_are_late_and_may_be_hits_yet(store: GatedStore) -> None:
    with engine_with(store) as engine:
        match = match_of(engine, PROMPT)
        store.gate.clear()
        go_on_without(engine, match, store)
        store.gate.set()
        assert engine.cache.flush(DEADLINE_S)
        assert counted(engine) == {"asked": 10, "late": 10}
        assert engine.run(PROMPT)["host"] == 10 * PAGE_TOKENS
        assert counted(engine) == {"asked": 10, "hit": 10, "late": 10}


@pytest.mark.parametrize("ends", ["prefetch_timeout", "acquire_timeout", "interrupt"])
def test_what_has_not_begun_is_cancelled_when_its_request_goes_on_or_ends(store: GatedStore, ends: str) -> None:
    patience = 0.02 if ends == "prefetch_timeout" else 30.0
    with engine_with(store, prefetch_timeout_s=patience) as engine:
        in_the_way = match_of(engine, OTHER)
        match = match_of(engine, PROMPT)
        store.gate.clear()
        assert engine.cache.prefetch(in_the_way) is not None
        assert store.entered.acquire(timeout=DEADLINE_S)  # the only thread waits in it
        if ends == "interrupt":
            interrupted = mock.patch.object(acquire, "_first_late", side_effect=KeyboardInterrupt)
            with interrupted, pytest.raises(KeyboardInterrupt):
                engine.cache.acquire(match)
        else:
            with engine.cache.acquire(match, timeout_s=0.05) as lease:
                assert lease.num_tokens == 0
        assert counted(engine) == {"asked": 20, "cancelled": 10}
        store.gate.set()
        assert engine.cache.flush(DEADLINE_S)
        assert counted(engine) == {"asked": 20, "cancelled": 10}, "an order by hand is nobody's to cancel"
        assert engine.cache.match(PROMPT).pages_by_tier["storage"] == 10, "it was not tried: storage has it still"


def test_an_order_by_hand_outlives_a_request_that_joined_it(store: GatedStore) -> None:
    with engine_with(store, prefetch_timeout_s=0.0) as engine:
        match = match_of(engine, PROMPT)
        store.gate.clear()
        assert engine.cache.prefetch(match_of(engine, OTHER)) is not None
        assert store.entered.acquire(timeout=DEADLINE_S)
        coming = engine.cache.prefetch(match)
        assert coming is not None
        with engine.cache.acquire(match) as lease:
            assert lease.num_tokens == 0
        store.gate.set()
        coming.wait(timeout_s=DEADLINE_S)
        assert counted(engine) == {"asked": 20, "late": 10}


def test_a_request_that_joins_what_another_has_cancelled_fetches_it_anew(store: GatedStore) -> None:
    """The first read of a batch has begun, the rest was cancelled: who comes then misses nothing."""
    with engine_with(store) as engine:
        attached = engine.cache._binding.slot.current
        assert attached is not None
        attached.io._chunk_bytes = 1  # one page a chunk
        match = match_of(engine, PROMPT)
        store.gate.clear()
        go_on_without(engine, match, store)
        assert counted(engine) == {"asked": 10}, "its first page is being read: the job is open"
        joiner = threading.Thread(target=engine.run, args=(PROMPT,))
        joiner.start()
        flights = engine.cache._binding.plane.flights
        until(lambda: any(flight.joined for flight in list(flights._flights.values())))
        store.gate.set()
        joiner.join(DEADLINE_S)
        assert counted(engine) == {"asked": 19, "hit": 10, "cancelled": 9}
