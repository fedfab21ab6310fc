"""A store that hangs in one part of a prefetch: what the other parts brought is used, what hangs stays pinned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from mover_support import until
from support import PAGE_TOKENS, TinyEngine

from kvhoist.config import CacheConfig
from kvhoist.messages import StorageKey
from kvhoist.storage import Buffer, MemoryStore, PageOutcomes, Sealer, StorageIO
from kvhoist.storage.outcomes import PENDING
from kvhoist.testing import Pages

DEADLINE_S = 20
PROMPT = list(range(8 * PAGE_TOKENS + 1))


class HangingStore(MemoryStore):
    """A store whose calls for pages of the chain hashes or keys in `hangs` wait for `gate`."""

    def __init__(self) -> None:
        super().__init__("8MiB")
        self.hangs: set[StorageKey | bytes] = set()
        self.gate = threading.Event()

    def get(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[bytes | None]:
        self._hang(keys)
        return super().get(keys, blobs)

    def put(self, keys: Sequence[StorageKey], headers: Sequence[bytes], blobs: Sequence[Buffer]) -> list[bool]:
        self._hang(keys)
        return super().put(keys, headers, blobs)

    def _hang(self, keys: Sequence[StorageKey]) -> None:
        if self.hangs.intersection([*keys, *(key.page.chain_hash for key in keys)]):
            assert self.gate.wait(DEADLINE_S)


@pytest.fixture
def store() -> Iterator[HangingStore]:
    made = HangingStore()
    yield made
    made.gate.set()


def test_the_parts_that_ended_are_told_once_and_the_whole_in_the_end(store: HangingStore) -> None:
    pages = Pages()
    assert all(pages.put(store, range(8)))
    store.hangs = {pages.key(2), pages.key(5)}
    io = StorageIO(store, pages.sealer, num_threads=4, hang_s=0.1)
    buffers = [memoryview(bytearray(pages.page_bytes)) for _ in range(8)]
    parts: list[PageOutcomes] = []
    reading = io.prefetch(pages.keys([0, 1, 2, 3, 4, 5, 99, 7]), buffers, on_part=parts.append)  # two pages a chunk
    until(lambda: bool(parts), "a part is told")
    assert [reason == PENDING for reason in parts[0].reasons] == [False, False, True, True, True, True, False, False]
    assert parts[0].pending_pages == (2, 3, 4, 5)
    assert parts[0].reasons[0] is None
    assert parts[0].reasons[6] == "missing"
    assert bytes(buffers[0]) == bytes(pages.blob(0))
    assert not reading.done()
    store.gate.set()
    whole = reading.result(DEADLINE_S)
    assert whole.failed_pages == (6,)
    assert whole.pending_pages == ()
    assert len(parts) <= 2, "where one of the two chunks ended after the other"
    assert io.close(timeout_s=DEADLINE_S)


def test_without_a_hang_no_part_is_told(store: HangingStore) -> None:
    pages = Pages()
    assert all(pages.put(store, range(8)))
    io = StorageIO(store, Sealer(), num_threads=4)
    buffers = [memoryview(bytearray(pages.page_bytes)) for _ in range(8)]
    parts: list[PageOutcomes] = []
    assert io.prefetch(pages.keys(range(8)), buffers, on_part=parts.append).result(DEADLINE_S).error is None
    assert io.close(timeout_s=DEADLINE_S)
    assert parts == []


@pytest.fixture
def hung(store: HangingStore) -> Iterator[Callable[..., TinyEngine]]:
    """Start an engine over a store that holds PROMPT's pages and hangs in the sixth; one page a chunk."""
    with TinyEngine(device_pages=12, host_pages=12, store=store) as engine:
        engine.run(PROMPT)
        assert engine.cache.flush(DEADLINE_S)
        sixth = engine.cache.match(PROMPT).keys[5]
    store.hangs = {sixth}
    engines: list[TinyEngine] = []

    def start(**options: Any) -> TinyEngine:
        engine = TinyEngine(device_pages=12, host_pages=12, store=store, config=CacheConfig(**options))
        attached = engine.cache._binding.slot.current
        assert attached is not None
        attached.io._breaker._hang_s = 0.1
        engines.append(engine)
        return engine

    yield start
    store.gate.set()
    for engine in engines:
        assert engine.cache.flush(DEADLINE_S)
        engine.cache.audit()
        engine.cache.close()


@pytest.mark.parametrize("debug_verify", [False, True])
def test_what_came_is_loaded_though_one_page_hangs(
    hung: Callable[..., TinyEngine], store: HangingStore, debug_verify: bool
) -> None:
    engine = hung(prefetch_timeout_s=0.6, debug_verify=debug_verify)
    assert engine.run(PROMPT)["storage"] == 5 * PAGE_TOKENS
    engine.cache.audit()
    host = engine.cache.stats().directory.tiers["host"]
    assert host.filling_pages == 1, "only what hangs is held"
    assert engine.cache.evict("host", 12) == 2, "what lies behind it may go; what lies before it, not before it"
    store.gate.set()
    assert engine.cache.flush(DEADLINE_S)
    stats = engine.cache.stats()
    assert (stats.jobs["prefetch"]["jobs"], stats.jobs["prefetch"]["pages"]) == (1, 8)
    assert stats.jobs["prefetch"]["bytes"] == 8 * engine.geometry.groups[0].page_bytes
    assert stats.num_mismatches == 0
    assert stats.prefetches.asked_pages == 8


def test_a_later_request_uses_what_came_and_does_not_wait_for_what_hangs(hung: Callable[..., TinyEngine]) -> None:
    engine = hung(prefetch_policy="wait_complete", acquire_timeout_s=10 * DEADLINE_S)
    match = engine.cache.match(PROMPT)
    coming = engine.cache.prefetch(match)
    assert coming is not None
    until(lambda: engine.cache.stats().directory.tiers["host"].ready_pages == 7, "the others are ready")
    assert not coming.done
    began = time.monotonic()
    assert engine.run(PROMPT)["host"] == 5 * PAGE_TOKENS
    assert time.monotonic() - began < DEADLINE_S, "it waited for the page that hangs"
    assert not coming.done


def test_a_close_while_a_part_hangs_gives_every_page_back(hung: Callable[..., TinyEngine]) -> None:
    engine = hung(prefetch_timeout_s=0.3)
    engine.run(PROMPT)
    report = engine.cache.close(drain=False, timeout_s=0.2)
    assert report.memory_kept
    assert report.unfinished_jobs == 1
    engine.cache._binding.plane.audit()


def test_a_persist_that_hangs_in_one_page_keeps_that_page_alone(
    hung: Callable[..., TinyEngine], store: HangingStore
) -> None:
    for key in list(store._records):
        store.remove([key])
    engine = hung()
    engine.run(PROMPT)
    tiers = lambda: engine.cache.stats().directory.tiers  # noqa: E731
    until(lambda: tiers()["storage"].ready_pages == 7, "the others are known to be stored")
    assert engine.cache.evict("host", 12) == 2, "what lies behind the page that hangs may go"
    store.gate.set()
    assert engine.cache.flush(DEADLINE_S)
    assert tiers()["storage"].ready_pages == 8
    assert engine.cache.stats().jobs["persist"]["jobs"] == 1
    assert engine.cache.evict("host", 12) == 6


def test_a_detach_that_waits_no_longer_for_one_part_gives_the_others_back(
    hung: Callable[..., TinyEngine], store: HangingStore
) -> None:
    """The call has not run for as long as the breaker calls a hang, and nobody watches it any more."""
    engine = hung(prefetch_policy="wait_complete", acquire_timeout_s=10 * DEADLINE_S)
    attached = engine.cache._binding.slot.current
    assert attached is not None
    attached.io._breaker._hang_s = 1e6
    coming = engine.cache.prefetch(engine.cache.match(PROMPT))
    assert coming is not None
    until(lambda: attached.io.stats().prefetched_pages == 7, "the others are read")
    report = engine.cache.detach_store(drain=False, timeout_s=0.1)
    assert (report.memory_kept, report.hung_pages) == (True, 1)
    assert engine.cache.stats().directory.tiers["host"].filling_pages == 1
    assert engine.run(PROMPT)["host"] == 5 * PAGE_TOKENS, "a later request does not wait for what hangs"
    engine.cache.audit()


def test_the_whole_is_not_told_before_the_copies_know_of_a_part(
    hung: Callable[..., TinyEngine], store: HangingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a load may begin before `debug_verify` has the digests of all its pages, and find them wrong."""
    engine = hung(prefetch_policy="wait_complete", acquire_timeout_s=DEADLINE_S, debug_verify=True)
    copies: Any = engine.cache._binding.mover._copies
    remember, busy, goes_on = copies.arrived, threading.Event(), threading.Event()

    def remember_slowly(pages: Sequence[int]) -> None:
        if len(pages) == 7 and not busy.is_set():
            busy.set()
            assert goes_on.wait(DEADLINE_S)
        remember(pages)

    monkeypatch.setattr(copies, "arrived", remember_slowly)
    coming = engine.cache.prefetch(engine.cache.match(PROMPT))
    assert coming is not None
    assert busy.wait(DEADLINE_S)
    store.gate.set()
    threading.Timer(0.2, goes_on.set).start()
    coming.result(DEADLINE_S)
    assert engine.run(PROMPT)["host"] == 8 * PAGE_TOKENS
    assert engine.cache.stats().num_mismatches == 0
