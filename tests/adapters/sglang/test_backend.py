"""The backend in SGLang's hands: what goes in comes back, in every layout, and what is not there is a miss."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheStorage
from sglang_rig import PAGE, create_backend, filled, mha_pool, mla_pool, names, page_bytes, slots

from kvhoist.adapters.sglang import KvhoistStorage

POOLS = {
    f"{kind} {layout}": (make, layout)
    for kind, make, layouts in (
        ("MHA", mha_pool, ("page_first", "page_first_direct", "page_head", "layer_first")),
        ("MLA", mla_pool, ("page_first", "page_first_direct", "layer_first")),
    )
    for layout in layouts
} | {"MHA layer_first, few pieces in another order": (functools.partial(mha_pool, layers=2), "layer_first")}


@pytest.fixture(params=POOLS)
def pool(request: pytest.FixtureRequest) -> Any:
    make, layout = POOLS[request.param]
    return make(layout)


def test_the_interface_is_the_one_of_sglangs_wheel() -> None:
    source = inspect.getsourcefile(HiCacheStorage)
    assert source is not None
    assert source.endswith("sglang/srt/mem_cache/hicache_storage.py")
    assert issubclass(KvhoistStorage, HiCacheStorage)
    for name, theirs in inspect.getmembers(HiCacheStorage, inspect.isfunction):
        ours = list(inspect.signature(getattr(KvhoistStorage, name)).parameters)
        assert ours == list(inspect.signature(theirs).parameters), name


def test_pages_come_back_to_other_places_byte_for_byte(pool: Any, backend: Callable[..., Any]) -> None:
    made, keys = backend(pool), names(5)
    before = page_bytes(pool, [3, 1, 4, 9, 0])
    assert made.batch_set_v1(keys, slots([3, 1, 4, 9, 0])) == [True] * 5
    filled(pool)
    untouched = page_bytes(pool, [3, 1])
    assert made.batch_get_v1(keys, slots([8, 7, 6, 5, 2])) == [True] * 5
    assert page_bytes(pool, [8, 7, 6, 5, 2]) == before
    assert page_bytes(pool, [3, 1]) == untouched


def test_the_flat_interface_speaks_of_the_same_pages(pool: Any, backend: Callable[..., Any]) -> None:
    made, keys = backend(pool), names(4)
    assert made.batch_set_v1(keys[:2], slots([0, 1])) == [True, True]
    assert made.batch_set(keys[2:], [pool.get_data_page(page * PAGE) for page in (2, 3)])
    assert made.batch_exists(keys) == 4
    before = page_bytes(pool, [0, 1, 2, 3])
    target = pool.get_dummy_flat_data_page()
    assert made.get(keys[0], target) is target
    flat = [target, *made.batch_get(keys[1:])]
    assert [page.view(torch.uint8).numpy().tobytes() for page in flat] == before
    filled(pool)
    assert made.batch_get_v1(keys, slots([4, 5, 6, 7])) == [True] * 4
    assert page_bytes(pool, [4, 5, 6, 7]) == before


def test_a_flat_page_of_another_size_is_no_hit_and_is_not_stored(backend: Callable[..., Any]) -> None:
    pool = mha_pool()
    made, (key, other) = backend(pool), names(2)
    whole = pool.get_data_page(0)
    assert made.set(key, whole)
    assert not made.set(other, whole[:-1])
    assert made.get(key, pool.get_dummy_flat_data_page()[1:].clone()) is None
    assert made.get(other) is None
    assert not made.exists(other)
    assert made.exists(key)
    assert made.counts()["failed_calls"] == 2


def test_page_first_pools_are_read_and_written_in_place(pool: Any, backend: Callable[..., Any]) -> None:
    made = backend(pool)
    pages = made._pools["kv"].pages
    assert pages.in_place == (pool.layout != "layer_first")
    if pages.in_place:
        where = slots([2])
        (first, *_), (again, *_) = pages.sources(where), pages.targets(where)
        again[:] = bytes(len(again))
        assert not any(first)
        assert not any(page_bytes(pool, [2])[0][: len(first)])


def test_a_pool_whose_k_and_v_differ_in_width_has_no_flat_pages_but_is_served(backend: Callable[..., Any]) -> None:
    pool, keys = mha_pool(v_dim=4), names(2)
    made = backend(pool)

    def at(pages: list[int]) -> list[torch.Tensor]:
        return [part[page * PAGE : (page + 1) * PAGE].clone() for page in pages for part in pool.kv_buffer]

    before = at([0, 1])
    assert made.batch_set_v1(keys, slots([0, 1])) == [True, True]
    filled(pool)
    assert made.batch_get_v1(keys, slots([5, 3])) == [True, True]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(at([5, 3]), before, strict=True))
    assert made.get(keys[0], torch.zeros(8)) is None
    assert not made.set(keys[0], torch.zeros(8))


def test_hits_are_counted_from_the_first_page_on(backend: Callable[..., Any]) -> None:
    made, keys = backend(mha_pool()), names(6)
    made.batch_set_v1(keys[:3], slots([0, 1, 2]))
    made.batch_set_v1(keys[4:], slots([4, 5]))
    assert made.batch_exists(keys) == 3
    assert made.batch_exists(keys[3:]) == 0
    assert made.batch_exists(keys[4:]) == 2
    assert made.batch_exists([]) == 0
    assert [made.exists(key) for key in keys] == [True, True, True, False, True, True]


def test_a_missing_page_in_the_middle_is_the_only_one_that_fails(pool: Any, backend: Callable[..., Any]) -> None:
    made, keys = backend(pool), names(3)
    before = page_bytes(pool, [0, 2])
    made.batch_set_v1([keys[0], keys[2]], slots([0, 2]))
    filled(pool)
    assert made.batch_get_v1(keys, slots([5, 6, 7])) == [True, False, True]
    assert page_bytes(pool, [5, 7]) == before
    assert (made.counts()["prefetch_pages"], made.counts()["prefetch_failed_pages"]) == (2, 1)


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_a_batch_of_sglangs_size(layout: str, backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhoist.adapters.sglang.pages._ROUND_BYTES", 5000)  # several rounds where pages are copied
    pool = mha_pool(layout, pages=2 * STORAGE_BATCH_SIZE)
    made, keys = backend(pool), names(STORAGE_BATCH_SIZE)
    here, there = range(STORAGE_BATCH_SIZE), range(STORAGE_BATCH_SIZE, 2 * STORAGE_BATCH_SIZE)
    before = page_bytes(pool, here)
    assert all(made.batch_set_v1(keys, slots(here)))
    assert made.batch_exists(keys) == STORAGE_BATCH_SIZE
    assert all(made.batch_get_v1(keys, slots(there)))
    assert page_bytes(pool, there) == before


def test_indices_that_do_not_fit_the_keys_touch_nothing(backend: Callable[..., Any]) -> None:
    pool = mha_pool()
    made, keys = backend(pool), names(2)
    before = page_bytes(pool, range(16))
    assert made.batch_set_v1(keys, slots([0])) == [False, False]
    assert made.batch_get_v1(keys, None) == [False, False]
    assert made.batch_exists(keys) == 0
    assert page_bytes(pool, range(16)) == before


def test_pages_outlive_the_process_that_stored_them(pool: Any, backend: Callable[..., Any]) -> None:
    first, keys = backend(pool), names(3)
    before = page_bytes(pool, [0, 1, 2])
    first.batch_set_v1(keys, slots([0, 1, 2]))
    first.close()
    filled(pool)
    assert (first.batch_exists(keys), first.batch_get_v1(keys, slots([0, 1, 2]))) == (0, [False] * 3)
    second = backend(pool)
    assert second.batch_exists(keys) == 3
    assert second.batch_get_v1(keys, slots([0, 1, 2])) == [True] * 3
    assert page_bytes(pool, [0, 1, 2]) == before


def test_clear_removes_this_models_pages_and_no_others(backend: Callable[..., Any]) -> None:
    pool, keys = mha_pool(), names(4)
    made, other = backend(pool), backend(pool, {"weights_id": "another"})
    assert all(made.batch_set_v1(keys, slots(range(4))))
    assert all(other.batch_set_v1(keys, slots(range(4))))
    assert made.clear()
    assert (made.batch_exists(keys), other.batch_exists(keys)) == (0, 4)
    assert all(made.batch_set_v1(keys, slots(range(4))))
    assert made.batch_exists(keys) == 4


def test_backup_and_prefetch_threads_do_not_disturb_each_other(backend: Callable[..., Any]) -> None:
    pool = mha_pool(pages=64)
    made, wrong = backend(pool), list[str]()
    before = dict(enumerate(page_bytes(pool, range(32))))

    def work(thread: int) -> None:
        mine = range(thread * 8, thread * 8 + 8)
        keys = names(8, f"thread {thread}")
        for _ in range(10):
            there = [page + 32 for page in mine]
            if not all(made.batch_set_v1(keys, slots(mine))) or made.batch_exists(keys) != 8:
                wrong.append(f"{thread}: not stored")
            if not all(made.batch_get_v1(keys, slots(there))):
                wrong.append(f"{thread}: not read")
            if page_bytes(pool, there) != [before[page] for page in mine]:
                wrong.append(f"{thread}: other bytes")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_metrics_are_sglangs_own(backend: Callable[..., Any]) -> None:
    pool, keys = mha_pool(), names(3)
    made = backend(pool, enable_storage_metrics=True)
    made.batch_set_v1(keys, slots([0, 1, 2]))
    made.batch_get_v1(keys[:2], slots([0, 1]))
    stats = made.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [2])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert stats.backup_bandwidth[0] > 0
    assert made.get_stats().backup_pgs == []


def test_turned_off_it_opens_nothing_and_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHOIST_DISABLE", "1")
    made, keys = create_backend(mha_pool(), {"storage": f"file:{tmp_path}/off"}), names(2)
    assert made.batch_set_v1(keys, slots([0, 1])) == made.batch_get_v1(keys, slots([0, 1])) == [False, False]
    assert (made.batch_exists(keys), made.get(keys[0]), made.set(keys[0], None)) == (0, None, False)
    assert not (tmp_path / "off").exists()
