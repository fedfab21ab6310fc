"""Random lives of a cache against a naive model: no hit on what was never computed, right bytes, books that add up."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import PAGE_TOKENS, TinyEngine

from kvhoist.config import CacheConfig
from kvhoist.control.pins import Pins
from kvhoist.storage.memory import MemoryStore

SALTS = [b"", b"tenant"]
prompts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=7).map(
    lambda pages: [token for page in pages for token in [page] * PAGE_TOKENS] + [9]
)


class FlakyStore(MemoryStore):
    """Fails every call while `broken`."""

    broken = False

    def put(self, keys, headers, blobs):
        self._fail()
        return super().put(keys, headers, blobs)

    def get(self, keys, blobs):
        self._fail()
        return super().get(keys, blobs)

    def exists(self, keys):
        self._fail()
        return super().exists(keys)

    def _fail(self) -> None:
        if self.broken:
            raise OSError("planted")


class CacheLife(RuleBasedStateMachine):
    """The model is the set of prefixes ever computed, by salt; prefixes are whole pages."""

    @initialize(
        device_pages=st.integers(8, 20),
        host_pages=st.integers(1, 12),
        blocks=st.sampled_from([1, 2]),
        policy=st.sampled_from(["write_through", "write_back", "write_through_selective"]),
        eviction=st.sampled_from(["lru", "slru", "lfu", "arc"]),
        storage_bytes=st.sampled_from([None, "64KiB", "1MiB"]),
        stages=st.booleans(),
    )
    def build(self, device_pages, host_pages, blocks, policy, eviction, storage_bytes, stages):
        self.store = FlakyStore(storage_bytes) if storage_bytes else None
        self.parked = FlakyStore("64KiB")
        retain = 0 if stages and storage_bytes else None
        self.options = {
            "device_pages": device_pages,
            "host_pages": host_pages,
            "blocks": blocks,
            "config": CacheConfig(
                write_policy=policy, eviction=eviction, min_hits=1, host_retain=retain, debug_verify=True
            ),
        }
        self.computed: set[tuple[bytes, tuple[int, ...]]] = set()
        self.pins: list[Pins] = []
        self.engine = TinyEngine(store=self.store, **self.options)

    @rule(tokens=prompts, salt=st.sampled_from(SALTS))
    def serve(self, tokens, salt):
        before = set(self.computed)
        found = sum(self.engine.run(tokens, salt=salt).values())
        assert found == 0 or (salt, tuple(tokens[:found])) in before, "a hit on what was never computed"
        self.computed |= {(salt, tuple(tokens[:end])) for end in range(PAGE_TOKENS, len(tokens), PAGE_TOKENS)}

    @rule(tokens=prompts, salt=st.sampled_from(SALTS))
    def give_up(self, tokens, salt):
        with self.engine.cache.reserve(tokens, salt=salt):
            pass

    @rule(tokens=prompts, salt=st.sampled_from(SALTS))
    def pin(self, tokens, salt):
        if len(self.pins) < 2:
            self.pins.append(self.engine.cache.pin(self.engine.cache.match(tokens[: 3 * PAGE_TOKENS], salt=salt)))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self):
        self.engine.cache.unpin(self.pins.pop())

    @rule(tier=st.sampled_from(["device", "host"]), num_pages=st.integers(0, 30))
    def evict(self, tier, num_pages):
        assert self.engine.cache.evict(tier, num_pages) <= num_pages

    @rule(tokens=prompts)
    def prefetch_and_persist(self, tokens):
        match = self.engine.cache.match(tokens)
        for transfer in (self.engine.cache.prefetch(match), self.engine.cache.persist(match)):
            if transfer is not None:
                transfer.result(30)

    @rule(storage=st.booleans())
    def clear(self, storage):
        self.engine.cache.clear(storage=storage)
        if storage or self.store is None:
            self.engine.cache.flush(30)
            self.engine.cache.clear(storage=storage)
            self.computed.clear()
            self.parked = FlakyStore("64KiB")
            assert all(self.engine.cache.match([page] * PAGE_TOKENS).num_pages == 0 for page in (1, 2))

    @rule()
    def flush(self):
        assert self.engine.cache.flush(30)

    @precondition(lambda self: self.store is not None)
    @rule(broken=st.booleans())
    def storage_breaks_or_mends(self, broken):
        self.store.broken = broken

    @rule(drain=st.booleans(), swap=st.booleans())
    def detach_or_attach(self, drain, swap):
        if self.store is not None:
            assert not self.engine.cache.detach_store(drain=drain, timeout_s=30).memory_kept
            assert self.engine.cache.stats().directory.tiers["storage"].ready_pages == 0
        if self.store is None or swap:
            self.store, self.parked = self.parked, self.store or FlakyStore("64KiB")
            self.engine.cache.attach_store(self.store)
        else:
            self.store, self.parked = None, self.store

    @rule(drain=st.booleans())
    def restart(self, drain):
        self.pins.clear()
        self.engine.cache.close(drain=drain)
        if self.store is None:  # then nothing is staged for it
            self.options["config"] = replace(self.options["config"], host_retain=None)
        self.engine = TinyEngine(store=self.store, **self.options)

    @invariant()
    def the_books_add_up(self):
        if hasattr(self, "engine"):
            self.engine.cache.audit()
            assert self.engine.cache.stats().num_mismatches == 0

    def teardown(self):
        if hasattr(self, "engine"):
            for pins in self.pins:
                self.engine.cache.unpin(pins)
            assert self.engine.cache.flush(30)
            self.engine.cache.clear()
            stats = self.engine.cache.stats().directory.tiers
            assert all(stats[tier].free_pages == stats[tier].capacity_pages for tier in ("device", "host"))
            self.engine.cache.close()


CacheLife.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_cache_life = CacheLife.TestCase
