"""What becomes of pages on their way to storage: each is written once, and what the queue drops is counted and told."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import PAGE_TOKENS, TinyEngine

from kvhoist.config import CacheConfig
from kvhoist.control.explain import MissKind
from kvhoist.messages import StorageKey
from kvhoist.storage import Buffer, FileStore, MemoryStore

DEADLINE_S = 20
PROMPT = list(range(10 * PAGE_TOKENS + 1))
OTHER = [7, *PROMPT]


class CountingStore(MemoryStore):
    """Counts the puts of each key; a put waits for `gate`."""

    def __init__(self) -> None:
        super().__init__("8MiB")
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.num_put: Counter[StorageKey] = Counter()

    def put(self, keys: Sequence[StorageKey], headers: Sequence[bytes], blobs: Sequence[Buffer]) -> list[bool]:
        self.num_put.update(keys)
        self.entered.release()
        assert self.gate.wait(DEADLINE_S)
        return super().put(keys, headers, blobs)


def test_what_the_queue_drops_is_counted_and_explain_says_so() -> None:
    store = CountingStore()
    store.gate.clear()
    config = CacheConfig(io_threads=1, max_queued_pages=4, lookup_timeout_s=0)
    with TinyEngine(device_pages=24, host_pages=24, store=store, config=config) as engine:
        engine.run(PROMPT[: 2 * PAGE_TOKENS])  # one chunk, which the store does not answer
        assert store.entered.acquire(timeout=DEADLINE_S)
        engine.run(OTHER)  # ten pages, where four may wait
        store.gate.set()
        assert engine.cache.flush(DEADLINE_S)
        stats = engine.cache.stats()
        assert stats.storage is not None
        assert (stats.storage.refused_pages, stats.jobs["persist"]["failed_pages"]) == (10, 10)
        assert engine.cache.evict("device", 24) == 12
        assert engine.cache.evict("host", 24) == 12
        assert engine.cache.match(PROMPT[: 2 * PAGE_TOKENS]).pages_by_tier["storage"] == 2
        miss = engine.cache.explain(OTHER).miss
        assert miss is not None
        assert miss.kind is MissKind.EVICTED
        assert "could not be brought to storage" in miss.text
        assert "queue full" in miss.text


def test_pages_that_the_queue_dropped_are_persisted_when_they_are_used_again() -> None:
    store = CountingStore()
    store.gate.clear()
    config = CacheConfig(io_threads=1, max_queued_pages=4, lookup_timeout_s=0)
    with TinyEngine(device_pages=24, host_pages=24, store=store, config=config) as engine:
        engine.run(PROMPT[: 2 * PAGE_TOKENS])
        assert store.entered.acquire(timeout=DEADLINE_S)
        engine.run(OTHER[: 4 * PAGE_TOKENS])
        engine.run(PROMPT[: 2 * PAGE_TOKENS] + OTHER)
        store.gate.set()
        assert engine.cache.flush(DEADLINE_S)
        assert store.stats().put_pages < 2 + 4 + 10
        engine.run([*OTHER[: 4 * PAGE_TOKENS], 1])
        assert engine.cache.flush(DEADLINE_S)
        assert store.num_put.most_common(1)[0][1] == 1


def test_no_page_is_written_twice_for_requests_that_offer_it_at_once() -> None:
    store = CountingStore()
    with TinyEngine(device_pages=200, host_pages=200, store=store) as engine:
        prompts = [list(range(8 * PAGE_TOKENS)) + [i] * (2 * PAGE_TOKENS) for i in range(4)] * 3
        threads = [threading.Thread(target=engine.run, args=(prompt,), kwargs={"check": False}) for prompt in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert engine.cache.flush(DEADLINE_S)
        assert len(store.num_put) == 8 + 4 * 2
        assert set(store.num_put.values()) == {1}
        for prompt in prompts:
            engine.run(prompt)
        assert engine.cache.flush(DEADLINE_S)
        assert set(store.num_put.values()) == {1}


def test_a_page_that_storage_holds_already_is_not_persisted_again() -> None:
    """Also where it leaves the host tier and is computed and offloaded again."""
    store = CountingStore()
    with TinyEngine(device_pages=12, host_pages=12, store=store) as engine:
        engine.run(PROMPT)
        assert engine.cache.flush(DEADLINE_S)
        engine.cache.evict("host", 12)
        match = engine.cache.match(PROMPT)
        assert engine.cache.offload(match) is not None
        assert engine.cache.flush(DEADLINE_S)
        assert set(store.num_put.values()) == {1}


@pytest.mark.parametrize("at_once", [False, True])
def test_two_stores_of_one_folder_write_each_page_once(tmp_path: Path, at_once: bool) -> None:
    """As two processes would, neither asking storage before it computes. A page that the other is seen to have is not
    written again; one that both write in the same instant lies twice, and each writes it once."""
    stores = [FileStore(tmp_path / "store", capacity="64MiB", refresh_s=0.0) for _ in range(2)]
    config = CacheConfig(lookup_timeout_s=0, io_threads=1)  # one thread sees all that the other store has
    with (
        TinyEngine(device_pages=24, host_pages=24, store=stores[0], config=config) as first,
        TinyEngine(device_pages=24, host_pages=24, store=stores[1], config=config) as second,
    ):
        threads = [threading.Thread(target=engine.run, args=(PROMPT,)) for engine in (first, second)]
        for thread, engine in zip(threads, (first, second), strict=True):
            thread.start()
            if not at_once:
                thread.join(DEADLINE_S)
                assert engine.cache.flush(DEADLINE_S)
        for thread, engine in zip(threads, (first, second), strict=True):
            thread.join(DEADLINE_S)
            assert engine.cache.flush(DEADLINE_S)
            assert engine.cache.stats().jobs["persist"]["failed_pages"] == 0
        written = [store.stats().put_pages for store in stores]
        assert 10 <= sum(written) <= (20 if at_once else 10), written
    for store in stores:
        store.close()
