"""The calls that an engine's thread makes, timed, and a load on storage beside them: what `kvhoist bench storage` needs
to tell whether storage is felt there."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from kvhoist.bench.device_cache import device_cache
from kvhoist.bench.shapes import PAGE_TOKENS, Shape
from kvhoist.bench.stopwatch import Stopwatch
from kvhoist.bench.storage_speed import BATCH_PAGES
from kvhoist.cache import HierarchicalCache
from kvhoist.config import CacheConfig
from kvhoist.control.directory_events import Event
from kvhoist.control.keys import TokenChain
from kvhoist.control.namespace import Namespace
from kvhoist.control.tiers import Tier
from kvhoist.geometry import CacheGeometry
from kvhoist.platform.base import CPU
from kvhoist.platform.open import open_platform
from kvhoist.storage.base import Store

_PROMPT_PAGES, _NUM_PROMPTS = 16, 8
_NUM_STORED = 4
_DEVICE_PAGES = 160
_HOST_PAGES = _NUM_PROMPTS * _PROMPT_PAGES + 4 * BATCH_PAGES
_BETWEEN_S = 0.001
_AFTER_MISS_S = 0.02
_PATIENCE_S = 1.0
_LOAD_EACH = 4


class EngineSide:
    """A cache of 160 device and 384 host pages over `store`, an engine's thread (the caller's) and a load on storage.

    The load keeps batches of 64 pages on their way: one thread fills pages and sends them to storage, one prefetches
    stored ones that the host tier gave up. Closing it does not close the store.
    """

    def __init__(self, store: Store, shape: Shape) -> None:
        geometry = CacheGeometry((shape.group,))
        self.cache = HierarchicalCache(
            geometry,
            Namespace.create(model_id="bench", weights_id="bench", kv_dtype="uint8", geometry=geometry),
            device=device_cache(open_platform(CPU), shape.group, _DEVICE_PAGES, fill=True),
            host_bytes=_HOST_PAGES * shape.group.page_pitch_bytes,
            store=store,
            # Nothing is written unless it is told to be: an idle engine side shall be idle.
            config=CacheConfig(write_policy="write_through_selective", min_hits=1 << 30, lookup_timeout_s=0.0),
        )
        self._first_tokens = itertools.count()
        self._prompts = [self._new_prompt(_PROMPT_PAGES) for _ in range(_NUM_PROMPTS)]
        self._stored = [self._new_prompt(BATCH_PAGES) for _ in range(_NUM_STORED)]
        self._stored_pages = 0
        self._stored_changed = threading.Condition()
        self._state = threading.Condition()
        self._loads = self._closing = False
        self._num_parked = 0
        self.cache.subscribe(self._note)
        for prompt in self._stored:
            self._persist(*prompt)
        self.cache.flush()
        self._pins = []
        for tokens, chain in self._prompts:
            self.cache.reserve(tokens, chain=chain).commit()
            transfer = self.cache.offload(self.cache.match(tokens, chain=chain))
            assert transfer is not None, "the host tier has room for the prompts"
            transfer.result()
            self.cache.evict("device", _DEVICE_PAGES)
            self._pins.append(self.cache.pin(self.cache.match(tokens, chain=chain)))
        self.cache.flush()
        self._threads = [
            threading.Thread(target=act, name=f"bench-{act.__name__}", daemon=True)
            for act in (self._write_on, self._prefetch_on)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the load and the cache."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        for thread in self._threads:
            thread.join()
        for pins in self._pins:
            self.cache.unpin(pins)
        self.cache.close()

    @contextmanager
    def load(self) -> Iterator[None]:
        """Keep storage busy meanwhile; afterwards nothing is under way, unless the store hangs."""
        with self._state:
            self._loads = True
            self._state.notify_all()
        try:
            yield
        finally:
            with self._state:
                self._loads = False
                self._state.wait_for(lambda: self._num_parked == len(self._threads))
            self.cache.flush()

    def run(self, seconds: float, watch: Stopwatch) -> None:
        """Do what an engine does a step, for so long, and time each call: `match` of a prompt in the host tier and of
        one that storage is asked for, neither waits; now and then `acquire`, which returns while loads are under way,
        `release`, and `reserve` and `commit` of new pages."""
        until = time.perf_counter() + seconds
        for number in itertools.count():
            if time.perf_counter() >= until:
                return
            self._step(*self._prompts[number // _LOAD_EACH % _NUM_PROMPTS], watch, loads=number % _LOAD_EACH == 0)
            time.sleep(_BETWEEN_S)  # the model's turn

    def moved_pages(self) -> tuple[int, int]:
        """Return how many pages were persisted and prefetched so far."""
        storage = self.cache.stats().storage
        assert storage is not None, "the cache has a store"
        return storage.persisted_pages, storage.prefetched_pages

    def lost_pages(self) -> int:
        """Return the page ids that nobody holds and that are not free, with nothing under way. Raises PageIdError where
        the books do not add up otherwise."""
        self.cache.flush()
        self.cache.audit()
        tiers = self.cache.stats().directory.tiers
        return sum(
            tier.capacity_pages - tier.free_pages - tier.ready_pages
            for tier in (tiers[str(Tier.HOST)], tiers[str(Tier.DEVICE)])
        )

    def _step(self, tokens: Sequence[int], chain: TokenChain, watch: Stopwatch, *, loads: bool) -> None:
        cache = self.cache
        fresh, fresh_chain = self._new_prompt(_PROMPT_PAGES)
        match = watch.time("match", lambda: cache.match(tokens, chain=chain, timeout_s=0.0))
        watch.time("match unknown", lambda: cache.match(fresh, chain=fresh_chain, timeout_s=0.0))
        if not loads:
            return
        lease = watch.time("acquire", lambda: cache.acquire(match, layerwise=True))
        lease.wait()
        watch.time("release", lease.release)
        reservation = watch.time("reserve", lambda: cache.reserve(fresh, chain=fresh_chain))
        watch.time("commit", reservation.commit)

    def _write_on(self) -> None:
        while self._goes_on():
            self._persist(*self._new_prompt(BATCH_PAGES))

    def _prefetch_on(self) -> None:
        for tokens, chain in itertools.cycle(self._stored):
            if not self._goes_on():
                return
            match = self.cache.match(tokens, chain=chain)
            if match.num_pages < BATCH_PAGES:  # storage lost them
                self._persist(tokens, chain)
            elif (transfer := self.cache.prefetch(match)) is not None:
                with suppress(TimeoutError):
                    transfer.result(_PATIENCE_S)
            else:
                self.cache.persist(match)
                time.sleep(_AFTER_MISS_S)

    def _goes_on(self) -> bool:
        with self._state:
            self._num_parked += 1
            self._state.notify_all()
            self._state.wait_for(lambda: self._loads or self._closing)
            self._num_parked -= 1
            return not self._closing

    def _persist(self, tokens: Sequence[int], chain: TokenChain) -> None:
        """Fill a batch of pages and send it to storage; wait until it is there, or for a while."""
        self.cache.reserve(tokens, chain=chain).commit()
        with self._stored_changed:
            before = self._stored_pages
        self.cache.offload(self.cache.match(tokens, chain=chain))
        with self._stored_changed:
            self._stored_changed.wait_for(lambda: self._stored_pages >= before + BATCH_PAGES, _PATIENCE_S)

    def _note(self, event: Event) -> None:
        if event.tier is Tier.STORAGE and event.kind == "stored":
            with self._stored_changed:
                self._stored_pages += len(event.keys)
                self._stored_changed.notify_all()

    def _new_prompt(self, num_pages: int) -> tuple[list[int], TokenChain]:
        first = next(self._first_tokens)
        return [first, *range(1, num_pages * PAGE_TOKENS + 1)][: num_pages * PAGE_TOKENS], TokenChain(PAGE_TOKENS)
