"""What every store does, whatever it keeps its records in."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvhoist.errors import ClosedError
from kvhoist.storage import FileStore, MemoryStore, Store


@pytest.fixture(params=["memory", "file", "file, fsync=batch"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store
    if request.param == "memory":
        made = MemoryStore("8MiB")
    else:
        fsync = "batch" if "fsync" in request.param else "never"
        made = FileStore(tmp_path / "store", capacity="8MiB", fsync=fsync, refresh_s=0.0)
    yield made
    made.close()


def test_what_was_put_comes_back(store: Store, pages: Any) -> None:
    assert pages.put(store, range(20)) == [True] * 20
    assert pages.read(store, range(20)) == ["good"] * 20
    assert store.exists(pages.keys([3, 99])) == [True, False]
    assert pages.read(store, [99, 3]) == ["missing", "good"]
    stats = store.stats()
    assert (stats.num_pages, stats.put_pages, stats.get_pages, stats.missing_pages) == (20, 20, 21, 1)


@pytest.mark.parametrize("page_bytes", [1, 4095, 4096, 4097, 40960])
def test_any_length_of_blob_comes_back(store: Store, pages_of: Any, page_bytes: int) -> None:
    pages = pages_of(page_bytes=page_bytes)
    assert all(pages.put(store, range(5)))
    assert pages.read(store, [4, 2, 3, 0, 1]) == ["good"] * 5


def test_a_key_that_is_held_is_not_replaced(store: Store, pages: Any) -> None:
    pages.put(store, [1])
    other = memoryview(bytes(pages.page_bytes))
    assert store.put([pages.key(1)], [pages.sealer.seal(pages.key(1), other)], [other]) == [True]
    assert pages.read(store, [1]) == ["good"]
    assert store.stats().put_pages == 1


def test_a_key_twice_in_one_batch_is_kept_once(store: Store, pages: Any) -> None:
    assert pages.put(store, [1, 1, 2]) == [True] * 3
    assert pages.read(store, [1, 2, 1]) == ["good"] * 3
    assert store.stats().num_pages == 2


def test_an_empty_batch_is_fine(store: Store, pages: Any) -> None:
    assert store.put([], [], []) == []
    assert store.get([], []) == []
    assert store.exists([]) == []


def test_removed_and_quarantined_pages_are_missing_and_can_be_put_again(store: Store, pages: Any) -> None:
    pages.put(store, range(6))
    assert store.remove(pages.keys([0, 1, 99])) == 2
    store.quarantine(pages.keys([2, 98]))
    assert store.stats().quarantined_pages == 1
    assert pages.read(store, range(6)) == ["missing"] * 3 + ["good"] * 3
    assert pages.put(store, range(6)) == [True] * 6
    assert pages.read(store, range(6)) == ["good"] * 6


def test_a_namespace_is_removed_without_the_others(store: Store, pages: Any, pages_of: Any) -> None:
    others = pages_of(namespace=b"\7" * 32)
    pages.put(store, range(4))
    others.put(store, range(4))
    assert store.remove_namespace(others.namespace) == 4
    assert others.read(store, range(4)) == ["missing"] * 4
    assert pages.read(store, range(4)) == ["good"] * 4


def test_keys_that_differ_in_one_part_are_different_pages(store: Store, pages_of: Any) -> None:
    kinds = [
        pages_of(),
        pages_of(namespace=b"\1" * 32),
        pages_of(group=1),
        pages_of(shard=(1, 2)),
        pages_of(shard=(0, 0)),
    ]
    assert all(all(kind.put(store, [7])) for kind in kinds)
    assert store.stats().num_pages == len(kinds)
    assert [kind.read(store, [7]) for kind in kinds] == [["good"]] * len(kinds)


def test_namespaces_are_noted_once_and_come_back(store: Store) -> None:
    store.note_namespace(b"a" * 32, {"model": "x", "dtype": "bf16"})
    store.note_namespace(b"a" * 32, {"model": "x", "dtype": "bf16"})
    store.note_namespace(b"b" * 32, {"model": "y"})
    assert store.namespaces() == {b"a" * 32: {"model": "x", "dtype": "bf16"}, b"b" * 32: {"model": "y"}}


def test_a_buffer_of_another_length_never_passes_the_check(store: Store, pages: Any) -> None:
    pages.put(store, [1])
    for length in (0, 10, pages.page_bytes - 1, pages.page_bytes + 1, 3 * pages.page_bytes):
        buffer = memoryview(bytearray(length))
        (header,) = store.get([pages.key(1)], [buffer])
        assert header is None or pages.sealer.check(pages.key(1), header, buffer) is not None


def test_a_closed_store_says_so(store: Store, pages: Any) -> None:
    pages.put(store, [1])
    store.close()
    store.close()
    for act in (lambda: pages.put(store, [1]), lambda: pages.read(store, [1]), lambda: store.exists([])):
        with pytest.raises(ClosedError, match="closed"):
            act()


def test_threads_at_once_lose_and_mix_up_nothing(store: Store, pages: Any) -> None:
    def work(seed: int) -> list[str]:
        ids = [(seed * 7 + i) % 60 for i in range(40)]
        assert all(pages.put(store, ids))
        return list(pages.read(store, ids))

    with ThreadPoolExecutor(6) as pool:
        outcomes = [outcome for row in pool.map(work, range(12)) for outcome in row]
    assert set(outcomes) == {"good"}
    assert store.stats().num_pages == 60


def test_memory_store_evicts_the_least_recently_used(pages: Any) -> None:
    store = MemoryStore(4 * (pages.page_bytes + 256))
    pages.put(store, range(4))
    pages.read(store, [0])
    pages.put(store, [4])
    assert store.exists(pages.keys(range(5))) == [True, False, True, True, True]
    assert store.stats().evicted_pages == 1


def test_memory_store_drops_what_is_larger_than_it(pages: Any) -> None:
    store = MemoryStore(100)
    assert pages.put(store, [1]) == [False]
    assert store.stats().dropped_pages == 1
