"""The storage backend that SGLang's HiCache loads: its interface, over a store of kvhoist's."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from kvhoist.adapters.sglang.engine import EngineFacts, read_engine
from kvhoist.adapters.sglang.identity import PoolNames
from kvhoist.adapters.sglang.options import StorageOptions
from kvhoist.adapters.sglang.pages import HostPages
from kvhoist.adapters.sglang.traffic import Traffic
from kvhoist.affinity import start
from kvhoist.errors import ClosedError, ConfigError
from kvhoist.settings import Settings
from kvhoist.storage import Buffer, PageOutcomes, Sealer, StorageIO, open_store
from kvhoist.storage.base import register_memory

_KV = "kv"
_WAITING_PAGES = 1 << 20
"""More than SGLang ever has under way: its threads wait for each batch, so that nothing is refused here."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _Pool:
    pages: HostPages
    names: PoolNames


class KvhoistStorage(HiCacheStorage):
    """One rank's storage tier. SGLang's backup and prefetch threads call it and wait; it is thread-safe.

    Nothing that the store does is raised into the engine: a page that cannot be read, or fails its check, is a miss,
    one that cannot be written is not stored; both are counted, and the first of each kind is logged. Only what is wrong
    at the start is raised (ConfigError: settings, weights without a name, a host pool that cannot be read).

    SGLang owns the host pools; their memory is read and written only inside of a call. The store is opened here and
    closed by `close`. With KVHOIST_DISABLE=1 it opens none, finds nothing and stores nothing.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """`storage_config` is SGLang's HiCacheStorageConfig, our options in its extra_config; `kwargs` is unused."""
        self._config = storage_config
        self._options = StorageOptions.parse(storage_config.extra_config)
        self._traffic = Traffic(bool(storage_config.enable_storage_metrics))
        self._pools: dict[str, _Pool] = {}
        self._facts: EngineFacts | None = None
        self._io: StorageIO | None = None
        if not Settings.from_env().disabled:
            sealer = Sealer(self._options.secret())
            threads = self._options.io_threads
            store = open_store(self._options.address)
            self._io = StorageIO(store, sealer, num_threads=threads, max_queued_pages=_WAITING_PAGES)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of K and V (or the latent rows). Raises ConfigError for one that cannot be served."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take one more pool (an indexer's, a window's, a state's). Raises ConfigError for one that is not served."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many pages from the first on are stored whole."""
        return self._guarded("batch_exists", lambda: self._leading(_KV, keys), 0)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages into the host pool, in place; one that answers False may have been written over."""
        return self._guarded("batch_get_v1", lambda: self._read(_KV, keys, host_indices), [False] * len(keys))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool. True also where another rank writes this page, or the store has it."""
        return self._guarded("batch_set_v1", lambda: self._write(_KV, keys, host_indices), [False] * len(keys))

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return how many pages from the first on can be restored with what they need of each other pool."""
        return self._guarded(
            "batch_exists_v2", lambda: self._restorable(keys, pool_transfers or []), PoolTransferResult.empty()
        )

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages into the pools of `transfers`."""
        return {t.name: self._one_of(t, self._read, "batch_get_v2") for t in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of the pools of `transfers`."""
        return {t.name: self._one_of(t, self._write, "batch_set_v2") for t in transfers}

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read one page into a flat tensor, and return that; None where it is no hit."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Read pages into flat tensors, the pool's own kind where none are given; None for each that is no hit."""
        return self._guarded("batch_get", lambda: self._read_flat(keys, target_locations), [None] * len(keys))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one flat page."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store flat pages; whether all are stored."""
        return self._guarded("batch_set", lambda: self._write_flat(keys, values or []), False)

    def exists(self, key: str) -> bool:
        """Tell whether a page is stored whole."""
        return self.batch_exists([key]) == 1

    def clear(self) -> bool:
        """Remove the pages of this engine's model, and no others, from the store; whether that could be done."""
        return self._guarded("clear", self._remove_all, False)

    def get_stats(self) -> Any:
        """Return SGLang's StorageMetrics since the last call."""
        return self._traffic.take_metrics()

    def counts(self) -> dict[str, int]:
        """Return what was counted so far: pages, failed pages and bytes of each kind of call, and failed calls."""
        return self._traffic.counts()

    def close(self) -> None:
        """Finish what is under way and close the store. Idempotent; later calls find nothing."""
        io, self._io = self._io, None
        if io is not None and io.close():
            io.store.close()

    def _register(self, name: str, host_pool: Any) -> None:
        known = self._pools.get(name)
        if self._io is None or (known is not None and known.pages.pool is host_pool):
            return
        pages = HostPages(name, host_pool)
        if self._facts is None:
            self._facts = read_engine(self._config.model_name, self._options)
        names = PoolNames(self._facts, pages, self._config, self._options)
        for memory in pages.memory():
            register_memory(self._io.store, memory)  # which `close` takes back
        self._pools[name] = _Pool(pages, names)
        # Not waited for: a store that hangs must not keep the engine from starting.
        arguments = self._io, names.namespace
        start(
            threading.Thread(target=self._traffic.note_namespace, args=arguments, name="kvhoist-namespace", daemon=True)
        )

    def _leading(self, name: str, keys: Sequence[str]) -> int:
        return _leading(self._held(name, keys))

    def _held(self, name: str, keys: Sequence[str]) -> list[bool]:
        pool = self._pool(name)
        outcomes = self._open().lookup(pool.names.keys(keys)).result()
        return self._by_page("lookup", pool, outcomes)

    def _restorable(self, keys: Sequence[str], transfers: Sequence[Any]) -> Any:
        kv_pages = self._leading(_KV, keys)
        hits = {_KV: kv_pages} if kv_pages else {}
        lengths = list(range(1, kv_pages + 1))
        for transfer in transfers:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # a second form of pages that are there already: it never decides
            held = self._held(str(transfer.name), keys[:kv_pages])
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                tail = max(1, len(transfer.keys or ()))
                able = {n for n in range(1, kv_pages + 1) if all(held[max(0, n - tail) : n])}
            else:
                able = set(range(1, _leading(held) + 1))
            if able:
                hits[transfer.name] = max(able)
            lengths = [n for n in lengths if n in able]
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def _one_of(self, transfer: Any, act: Callable[..., list[bool]], call: str) -> list[bool]:
        keys = transfer.keys or []
        work = functools.partial(act, str(transfer.name), keys, transfer.host_indices)
        return self._guarded(call, work, [False] * len(keys))

    def _write(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        pool = self._pool(name)
        if not pool.names.writes:
            return [True] * len(keys)
        io, pages, done = self._open(), pool.pages, list[bool]()
        slots = pages.slots_of(host_indices, len(keys))
        for first in range(0, len(keys), pages.pages_a_round):
            part = keys[first : first + pages.pages_a_round]
            sources = pages.sources(slots[first * pages.page_slots : (first + len(part)) * pages.page_slots])
            done += self._by_page("backup", pool, io.persist(pool.names.keys(part), sources).result())
        return done

    def _read(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        pool = self._pool(name)
        io, pages, done = self._open(), pool.pages, list[bool]()
        slots = pages.slots_of(host_indices, len(keys))
        for first in range(0, len(keys), pages.pages_a_round):
            part = keys[first : first + pages.pages_a_round]
            places = slots[first * pages.page_slots : (first + len(part)) * pages.page_slots]
            targets = pages.targets(places)
            good = self._by_page("prefetch", pool, io.prefetch(pool.names.keys(part), targets).result())
            pages.accept(places, targets, good)
            done += good
        return done

    def _read_flat(self, keys: Sequence[str], locations: Any) -> list[Any]:
        pool = self._pool(_KV)
        tensors = locations or [pool.pages.pool.get_dummy_flat_data_page() for _ in keys]
        buffers: list[Buffer] = [buffer for tensor in tensors for buffer in pool.pages.split(tensor)]
        good = self._by_page("prefetch", pool, self._open().prefetch(pool.names.keys(keys), buffers).result())
        return [tensor if ok else None for tensor, ok in zip(tensors, good, strict=True)]

    def _write_flat(self, keys: Sequence[str], values: Sequence[Any]) -> bool:
        pool = self._pool(_KV)
        if not pool.names.writes:
            return True
        buffers = [buffer for value in values for buffer in pool.pages.split(value.contiguous())]
        return all(self._by_page("backup", pool, self._open().persist(pool.names.keys(keys), buffers).result()))

    def _by_page(self, kind: str, pool: _Pool, outcomes: PageOutcomes) -> list[bool]:
        """Return which pages are good with all of their records, and count them."""
        step = len(pool.pages.record_bytes)
        good = [not any(outcomes.reasons[i : i + step]) for i in range(0, outcomes.num_pages, step)]
        self._traffic.moved(kind, sum(good), len(good) - sum(good), outcomes)
        return good

    def _remove_all(self) -> bool:
        store = self._open().store
        for pool in self._pools.values():
            store.remove_namespace(pool.names.namespace.digest)
        return True

    def _pool(self, name: str) -> _Pool:
        if name not in self._pools:
            raise ConfigError("no such host pool was registered", got=repr(name), choices=list(self._pools))
        return self._pools[name]

    def _open(self) -> StorageIO:
        if self._io is None:
            raise ClosedError("this backend was closed")
        return self._io

    def _guarded(self, call: str, work: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Return what `work` returns, and `otherwise` where it raises or there is no store."""
        if self._io is None:
            return otherwise
        try:
            return work()
        except Exception as error:  # whatever it is, the engine must go on without this page
            self._traffic.failed(call, error)
            return otherwise


def _leading(held: Sequence[bool]) -> int:
    return list(held).index(False) if False in held else len(held)
