"""SGLang's own cache controllers, with their threads, over kvhoist: backup, then prefetch into other host pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mover_support import until
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang_rig import OPTIONS, PAGE, filled, mha_pool, mla_pool, page_bytes
from sglang_standin import Engine, page_hashes

TOKENS = list(range(300 * PAGE))  # three of SGLang's batches, the last of them short


class DevicePool:
    """As much of a device pool as the storage side of a controller looks at."""

    device = "cpu"
    layer_num = 1

    def register_layer_transfer_counter(self, counter: Any) -> None:
        pass


class LatentDevicePool(DevicePool, MLATokenToKVPool):
    """The same, of an MLA model."""


@contextmanager
def running(cls: Any, host: Any, storage: str, *, device: Any = None, **options: Any) -> Iterator[Any]:
    """A controller as SGLang starts it with `--hicache-storage-backend dynamic`."""
    controller = cls(
        SimpleNamespace(get_kvcache=device or DevicePool),
        host,
        PAGE,
        None,
        load_cache_event=None,
        write_policy="write_through",
        storage_backend="dynamic",
        model_name="tiny",
        storage_backend_extra_config={**OPTIONS, "storage": storage, **options},
    )
    try:
        yield controller
    finally:
        controller.detach_storage_backend()


def group_of(*pools: tuple[PoolName, Any]) -> HostPoolGroup:
    return HostPoolGroup(
        [
            PoolEntry(name, pool, None, lambda layer: layer, is_primary_index_anchor=i == 0)
            for i, (name, pool) in enumerate(pools)
        ]
    )


def backed_up(controller: Any, host: Any, tokens: list[int], transfers: Any = None) -> torch.Tensor:
    """Let the backup thread store `tokens` from new host pages; their indices."""
    where = host.alloc(len(tokens))
    hashes = page_hashes(tokens, None, PAGE)
    extra = {"extra_pools": transfers} if transfers else {}
    controller.write_storage(where, tokens, hash_value=hashes, **extra)
    done = controller.ack_backup_queue.get(timeout=60)
    assert done.completed_tokens == len(tokens) // PAGE * PAGE or controller.backup_skip
    return where


def prefetched(controller: Any, host: Any, tokens: list[int], transfers: Any = None) -> tuple[int, torch.Tensor]:
    """Let the prefetch threads look `tokens` up and bring what is stored; how many came, and to which indices."""
    if isinstance(controller, hybrid_cache_controller.HybridCacheController):
        controller.prefetch(SimpleNamespace(rid="r"), tokens, extra_pools=transfers)
    else:
        controller.prefetch("r", tokens)
    operation = controller.prefetch_hit_queue.get(timeout=60)
    where = operation.host_indices = host.alloc(operation.storage_hit_count)
    controller.prefetch_buffer.put(operation)
    came = 0
    while not (ack := controller.ack_prefetch_queue.get(timeout=60)).completed_req:
        came = ack.completed_tokens if ack.completed_tokens is not None else came
    return came, where


def held(pool: Any, indices: torch.Tensor) -> list[bytes]:
    return page_bytes(pool, [int(index) // PAGE for index in indices[::PAGE]])


BASE, HYBRID = cache_controller.HiCacheController, hybrid_cache_controller.HybridCacheController


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
@pytest.mark.parametrize("kind", ["MHA", "MLA"])
@pytest.mark.parametrize("cls", [BASE, HYBRID], ids=["base", "hybrid"])
@pytest.mark.parametrize("interface", [1, 0], ids=["v1", "flat"])
def test_what_is_backed_up_is_prefetched_byte_for_byte(
    interface: int, cls: Any, kind: str, layout: str, checkpoint: Path, tmp_path: Path
) -> None:
    make, device = (mha_pool, DevicePool) if kind == "MHA" else (mla_pool, LatentDevicePool)
    pool = make(layout, pages=400)
    host = group_of((PoolName.KV, pool)) if cls is HYBRID else pool
    storage = f"file:{tmp_path}/store"
    with running(cls, host, storage, device=device, interface_v1=interface) as controller:
        assert prefetched(controller, host, TOKENS)[0] == 0
        where = backed_up(controller, host, TOKENS)
        before = held(pool, where)
        host.free(where)
    filled(pool)
    with running(cls, host, storage, device=device, interface_v1=interface) as controller:  # a restart
        came, where = prefetched(controller, host, TOKENS)
        assert came == len(TOKENS)
        assert held(pool, where) == before
        host.free(where)
        longer = TOKENS[: 150 * PAGE] + [7] * 20 * PAGE  # another way on after 150 pages
        came, where = prefetched(controller, host, longer)
        assert came == 150 * PAGE
        assert held(pool, where) == before[:150]
        host.free(where)
        assert prefetched(controller, host, [9, *TOKENS])[0] == 0


def test_a_damaged_page_ends_the_prefetch_there(checkpoint: Path, tmp_path: Path) -> None:
    pool = mha_pool(pages=400)
    storage = f"file:{tmp_path}/store"
    with running(BASE, pool, storage) as controller:
        where = backed_up(controller, pool, TOKENS)
        before = held(pool, where)
        pool.free(where)
    part = before[200][:64]
    (file,) = [f for f in (tmp_path / "store").rglob("*") if f.is_file() and part in f.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(part)] ^= 1
    file.write_bytes(data)
    filled(pool)
    with running(BASE, pool, storage) as controller:
        came, where = prefetched(controller, pool, TOKENS)
        assert came == 200 * PAGE
        assert held(pool, where)[:200] == before[:200]
        pool.free(where)
        assert prefetched(controller, pool, TOKENS)[0] == 200 * PAGE  # found missing at the query by now


def test_another_rank_of_a_latent_model_only_reads(checkpoint: Path, tmp_path: Path, engine: Engine) -> None:
    engine.parallel.tp_size = 2
    pools = [group_of((PoolName.KV, mla_pool(pages=400))) for _ in range(2)]
    with running(HYBRID, pools[0], f"file:{tmp_path}/store", device=LatentDevicePool) as writer:
        engine.parallel.tp_rank = 1
        with running(HYBRID, pools[1], f"file:{tmp_path}/store", device=LatentDevicePool) as reader:
            backed_up(reader, pools[1], TOKENS[: 4 * PAGE])
            assert prefetched(reader, pools[1], TOKENS)[0] == 0
            where = backed_up(writer, pools[0], TOKENS[: 4 * PAGE])
            until(lambda: prefetched(reader, pools[1], TOKENS)[0] == 4 * PAGE)
            came, there = prefetched(reader, pools[1], TOKENS)
            kv = [pool.get_pool(PoolName.KV) for pool in pools]
            assert came == 4 * PAGE
            assert held(kv[1], there) == held(kv[0], where)


@pytest.mark.parametrize("policy", [PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES])
def test_a_second_pool_travels_beside_the_first(policy: PoolHitPolicy, checkpoint: Path, tmp_path: Path) -> None:
    pool, window = mha_pool(pages=32), mha_pool(pages=32, heads=1)
    host = group_of((PoolName.KV, pool), (PoolName.INDEXER, window))
    tokens = TOKENS[: 6 * PAGE]
    with running(HYBRID, host, f"file:{tmp_path}/store") as controller:

        def second() -> list[Any]:
            return [PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV, hit_policy=policy)]

        where = backed_up(controller, host, tokens, second())
        before = held(pool, where), held(window, where)
        filled(pool)
        filled(window)
        came, there = prefetched(controller, host, tokens, second())
        assert came == len(tokens)
        assert (held(pool, there), held(window, there)) == before


def test_the_hits_of_several_pools_are_what_all_can_restore(backend: Callable[..., Any]) -> None:
    pool, window = mha_pool(), mha_pool(heads=1)
    made = backend(pool)
    made.register_mem_host_pool_v2(window, PoolName.SWA)
    keys = page_hashes(TOKENS[: 6 * PAGE], None, PAGE)
    first = torch.arange(6 * PAGE)

    def asked(policy: PoolHitPolicy, tail: int = 0) -> tuple[int, list[int], dict[str, int]]:
        transfer = PoolTransfer(PoolName.SWA, keys=keys[:tail], hit_policy=policy)
        found = made.batch_exists_v2(keys, [transfer])
        return found.kv_hit_pages, found.restorable_prefix_pages, found.extra_pool_hit_pages

    assert asked(PoolHitPolicy.ALL_PAGES) == (0, [], {})
    made.batch_set_v1(keys[:5], first[: 5 * PAGE])
    assert asked(PoolHitPolicy.ALL_PAGES) == (0, [], {"kv": 5})
    for page in (0, 2, 3):
        there = first[page * PAGE : (page + 1) * PAGE]
        made.batch_set_v2([PoolTransfer(PoolName.SWA, host_indices=there, keys=[keys[page]])])
    assert asked(PoolHitPolicy.ALL_PAGES) == (1, [1], {"kv": 5, "swa": 1})
    assert asked(PoolHitPolicy.TRAILING_PAGES, 1) == (4, [1, 3, 4], {"kv": 5, "swa": 4})
    assert asked(PoolHitPolicy.TRAILING_PAGES, 2) == (4, [1, 4], {"kv": 5, "swa": 4})
    assert asked(PoolHitPolicy.BLOCK_GROUPS) == (5, [1, 2, 3, 4, 5], {"kv": 5})


def test_settings_that_cannot_work_stop_the_controller(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown setting: strage"), running(BASE, mha_pool(), "memory:", strage=1):
        pass
