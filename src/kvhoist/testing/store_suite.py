"""What every store must do, as tests that its author runs: subclass `StoreSuite` and say how a store is opened.

from kvhoist.testing.store_suite import StoreSuite

class TestMyStore(StoreSuite):
    def open(self, place):          # place: an empty folder of this test's own
        return MyStore(place)
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvhoist.errors import ClosedError, ConfigError
from kvhoist.messages import REPLICATED, WHOLE, PageKey, Shard, StorageKey
from kvhoist.storage import Buffer, Sealer, StorageIO, Store
from kvhoist.testing.pages import Pages

_MAX = 2**32 - 1
_HOSTILE_HASHES = (
    b"\0",
    b"\0\0",
    b"..",
    b"/../../x",
    b"a" * 63,
    b"a" * 64,
    b"\n",
    b".*",
    b"%2e",
    b"\xff\xfe/\\:?*|",
    b"kv",
)


class StoreSuite:
    """The contract of `kvhoist.storage.Store`. Needs room for 8 MiB of pages.

    shared: two stores opened for one place hold the same records (else each has its own).
    """

    shared = True

    def open(self, place: Path) -> Store:
        """Open a store for `place`, empty at first. Called again for the same place while the first is open."""
        raise NotImplementedError("a suite needs its open()")

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture
    def store(self, place: Path) -> Iterator[Store]:
        store = self.open(place)
        yield store
        store.close()

    @pytest.fixture
    def second(self, store: Store, place: Path) -> Iterator[Store]:
        if not self.shared:
            pytest.skip("two of these stores have nothing in common")
        second = self.open(place)
        yield second
        second.close()

    @pytest.fixture
    def pages(self) -> Pages:
        return Pages()

    def test_what_was_put_comes_back(self, store: Store, pages: Pages) -> None:
        assert pages.put(store, range(20)) == [True] * 20
        assert pages.read(store, range(20)) == ["good"] * 20
        assert store.exists(pages.keys([3, 99])) == [True, False]
        assert pages.read(store, [99, 3]) == ["missing", "good"]
        stats = store.stats()
        assert (stats.num_pages, stats.put_pages, stats.get_pages, stats.missing_pages) == (20, 20, 21, 1)

    @pytest.mark.parametrize("page_bytes", [1, 255, 4095, 4096, 4097, 40960, 1 << 20])
    def test_any_length_of_blob_comes_back(self, store: Store, page_bytes: int) -> None:
        pages = Pages(page_bytes=page_bytes)
        assert all(pages.put(store, range(5)))
        assert pages.read(store, [4, 2, 3, 0, 1]) == ["good"] * 5

    def test_an_empty_batch_is_fine(self, store: Store) -> None:
        assert store.put([], [], []) == []
        assert store.get([], []) == []
        assert store.exists([]) == []
        assert store.remove([]) == 0
        store.quarantine([])

    def test_a_batch_of_many_pages_comes_back(self, store: Store) -> None:
        pages = Pages(page_bytes=500)
        assert all(pages.put(store, range(1000)))
        assert all(store.exists(pages.keys(range(1000))))
        assert pages.read(store, range(1200)) == ["good"] * 1000 + ["missing"] * 200

    def test_pages_of_different_lengths_come_in_one_batch(self, store: Store) -> None:
        kinds = [Pages(page_bytes=n, group=n) for n in (1, 9000, 300)]
        keys, blobs = [kind.key(1) for kind in kinds], [kind.blob(1) for kind in kinds]
        headers = [kind.sealer.seal(key, blob) for kind, key, blob in zip(kinds, keys, blobs, strict=True)]
        assert store.put(keys, headers, blobs) == [True] * 3
        assert [kind.read(store, [1]) for kind in kinds] == [["good"]] * 3

    def test_a_key_that_is_held_is_not_replaced(self, store: Store, pages: Pages) -> None:
        pages.put(store, [1])
        other = memoryview(bytes(pages.page_bytes))
        assert store.put([pages.key(1)], [pages.sealer.seal(pages.key(1), other)], [other]) == [True]
        assert pages.read(store, [1]) == ["good"]
        assert store.stats().put_pages == 1

    def test_a_key_twice_in_one_batch_is_kept_once(self, store: Store, pages: Pages) -> None:
        assert pages.put(store, [1, 1, 2]) == [True] * 3
        assert pages.read(store, [1, 2, 1]) == ["good"] * 3
        assert store.stats().num_pages == 2

    def test_nothing_of_the_callers_memory_is_kept(self, store: Store, pages: Pages) -> None:
        blob = memoryview(bytearray(pages.blob(1)))
        assert store.put([pages.key(1)], [pages.sealer.seal(pages.key(1), blob)], [blob]) == [True]
        blob[:] = bytes(len(blob))
        assert pages.read(store, [1]) == ["good"]

    def test_bytes_beside_a_buffer_are_left_alone(self, store: Store, pages: Pages) -> None:
        pages.put(store, [1, 2])
        memory = memoryview(bytearray(b"\x5a" * (2 * pages.page_bytes + 192)))
        ends = pages.page_bytes + 64
        buffers = [memory[64:ends], memory[ends + 64 : ends + 64 + pages.page_bytes]]
        headers = store.get(pages.keys([1, 2]), buffers)
        assert [buffer == pages.blob(i) for i, buffer in zip((1, 2), buffers, strict=True)] == [True, True]
        assert None not in headers
        assert {bytes(memory[:64]), bytes(memory[ends : ends + 64]), bytes(memory[-64:])} == {b"\x5a" * 64}

    @pytest.mark.parametrize("length", [0, 10, 5999, 6001, 18000])
    def test_a_buffer_of_another_length_never_passes_the_check(self, store: Store, pages: Pages, length: int) -> None:
        pages.put(store, [1, 2])
        buffers = [memoryview(bytearray(length)), memoryview(bytearray(pages.page_bytes))]
        first, second = store.get(pages.keys([1, 2]), buffers)
        assert first is None or pages.sealer.check(pages.key(1), first, buffers[0]) is not None
        assert second is not None
        assert pages.sealer.check(pages.key(2), second, buffers[1]) is None

    def test_a_record_of_another_page_or_secret_is_served_as_it_is(self, store: Store, pages: Pages) -> None:
        """The store does not judge: the check does, and the I/O pool takes the page out of use."""
        signed = Pages(sealer=Sealer(b"one secret"))
        assert signed.put(store, [1]) == [True]
        io = StorageIO(store, Sealer(b"another secret"), num_threads=1)
        buffer = memoryview(bytearray(pages.page_bytes))
        (reason,) = io.prefetch([pages.key(1)], [buffer]).result(60).reasons
        assert io.close()
        assert reason is not None
        assert "another secret" in reason
        assert store.exists([pages.key(1)]) == [False]
        assert store.stats().quarantined_pages == 1

    def test_removed_and_quarantined_pages_are_missing_and_can_be_put_again(self, store: Store, pages: Pages) -> None:
        pages.put(store, range(6))
        assert store.remove(pages.keys([0, 1, 99])) == 2
        store.quarantine(pages.keys([2, 98]))
        assert store.stats().quarantined_pages == 1
        assert store.stats().num_pages == 3
        assert pages.read(store, range(6)) == ["missing"] * 3 + ["good"] * 3
        assert pages.put(store, range(6)) == [True] * 6
        assert pages.read(store, range(6)) == ["good"] * 6

    def test_keys_that_differ_in_one_part_are_different_pages(self, store: Store) -> None:
        shards = (Shard(1, 2), REPLICATED, Shard(0, _MAX), Shard(_MAX, _MAX), Shard(1, 12), Shard(11, 2))
        groups = [Pages(group=group) for group in (1, 11, _MAX)]
        kinds = [Pages(), Pages(namespace=b"\1" * 32), *groups, *(Pages(shard=shard) for shard in shards)]
        assert all(kind.put(store, [7]) == [True] for kind in kinds)
        assert store.stats().num_pages == len(kinds)
        assert [kind.read(store, [7]) for kind in kinds] == [["good"]] * len(kinds)

    def test_hostile_keys_are_kept_apart(self, store: Store) -> None:
        namespaces = (bytes(32), b"/" * 32, b"." * 32, b"\xff" * 32)
        keys = [StorageKey(PageKey(ns, 0, name), WHOLE) for ns in namespaces for name in _HOSTILE_HASHES]
        sealer = Sealer()
        blobs = [memoryview(hashlib.sha256(repr(key).encode()).digest() * 4) for key in keys]
        assert all(store.put(keys, [sealer.seal(*pair) for pair in zip(keys, blobs, strict=True)], blobs))
        buffers = [memoryview(bytearray(128)) for _ in keys]
        headers = store.get(keys, buffers)
        for key, header, buffer in zip(keys, headers, buffers, strict=True):
            assert header is not None
            assert sealer.check(key, header, buffer) is None
        assert store.remove_namespace(b"." * 32) == len(_HOSTILE_HASHES)
        assert sum(store.exists(keys)) == 3 * len(_HOSTILE_HASHES)

    @pytest.mark.parametrize("chain_hash", [b"", b"x" * 65, b"y" * 4096])
    def test_a_key_that_no_record_can_have_is_not_there(self, store: Store, pages: Pages, chain_hash: bytes) -> None:
        pages.put(store, [1])
        with contextlib.suppress(ConfigError):  # which says so better
            assert store.exists([StorageKey(PageKey(pages.namespace, 0, chain_hash), WHOLE)]) == [False]
        assert pages.read(store, [1]) == ["good"]

    def test_a_namespace_is_removed_without_the_others(self, store: Store, pages: Pages) -> None:
        others = Pages(namespace=b"\7" * 32)
        pages.put(store, range(4))
        others.put(store, range(4))
        assert store.remove_namespace(others.namespace) == 4
        assert store.remove_namespace(b"\x09" * 32) == 0
        assert others.read(store, range(4)) == ["missing"] * 4
        assert pages.read(store, range(4)) == ["good"] * 4

    def test_namespaces_are_noted_once_and_come_back(self, store: Store) -> None:
        assert store.namespaces() == {}
        store.note_namespace(b"a" * 32, {"model": "x", "dtype": "bf16"})
        store.note_namespace(b"a" * 32, {"model": "x", "dtype": "bf16"})
        store.note_namespace(b"b" * 32, {"model": 'y"\n/../ü'})
        assert store.namespaces() == {b"a" * 32: {"model": "x", "dtype": "bf16"}, b"b" * 32: {"model": 'y"\n/../ü'}}

    def test_threads_at_once_lose_and_mix_up_nothing(self, store: Store, pages: Pages) -> None:
        def work(seed: int) -> list[str]:
            ids = [(seed * 7 + i) % 60 for i in range(40)]
            assert all(pages.put(store, ids))
            return pages.read(store, ids)

        with ThreadPoolExecutor(6) as pool:
            outcomes = [outcome for row in pool.map(work, range(12)) for outcome in row]
        assert set(outcomes) == {"good"}
        assert store.stats().num_pages == 60

    def test_readers_see_a_record_as_a_whole_or_not_at_all(self, store: Store) -> None:
        """While one thread puts and removes the same pages, what others read passes the check, or is not there, or
        (where it was removed under them) fails the check: never other bytes that pass it."""
        pages = Pages(page_bytes=200_000)
        ended = threading.Event()

        def read() -> set[str]:
            seen: set[str] = set()
            while not ended.is_set():
                seen.update(pages.read(store, range(4)))
            return seen

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            try:
                for _ in range(30):
                    assert all(pages.put(store, range(4)))
                    store.remove(pages.keys(range(4)))
            finally:
                ended.set()
            seen = set().union(*(reader.result(60) for reader in readers))
        assert "WRONG" not in seen

    def test_what_one_puts_another_reads(self, store: Store, second: Store, pages: Pages) -> None:
        assert pages.read(second, [1]) == ["missing"]
        pages.put(store, [1])
        assert pages.read(second, [1]) == ["good"]
        assert second.exists(pages.keys([1, 2])) == [True, False]
        assert pages.put(second, [1]) == [True]
        assert second.stats().put_pages == 0
        store.note_namespace(pages.namespace, {"model": "x"})
        assert second.namespaces() == {pages.namespace: {"model": "x"}}

    def test_one_that_closes_leaves_the_other_open(self, store: Store, second: Store, pages: Pages) -> None:
        pages.put(store, [1])
        second.close()
        assert pages.put(store, [2]) == [True]
        assert pages.read(store, [1, 2]) == ["good"] * 2

    def test_registered_memory_is_only_a_faster_way(self, store: Store, pages: Pages) -> None:
        """`register` and `unregister` are optional; a store that has none copies, or needs no copy anyway."""
        register, unregister = getattr(store, "register", None), getattr(store, "unregister", None)
        assert (register is None) == (unregister is None)
        if register is None or unregister is None:
            return
        arena = memoryview(bytearray(3 * pages.page_bytes))
        inside: list[Buffer] = [arena[i * pages.page_bytes : (i + 1) * pages.page_bytes] for i in range(3)]
        register(arena)
        inside[0][:] = pages.blob(0)
        keys = pages.keys([0, 1])
        blobs: list[Buffer] = [inside[0], pages.blob(1)]
        assert (
            store.put(keys, [pages.sealer.seal(*pair) for pair in zip(keys, blobs, strict=True)], blobs) == [True] * 2
        )
        assert None not in store.get(keys, [inside[1], inside[2]])
        assert [bytes(view) for view in inside[1:]] == [bytes(pages.blob(0)), bytes(pages.blob(1))]
        unregister(arena)
        unregister(arena)
        assert pages.read(store, [0, 1]) == ["good"] * 2

    def test_a_closed_store_says_so(self, place: Path, pages: Pages) -> None:
        store = self.open(place)
        pages.put(store, [1])
        store.close()
        store.close()
        for act in (
            lambda: pages.put(store, [1]),
            lambda: pages.read(store, [1]),
            lambda: store.exists([]),
            lambda: store.remove(pages.keys([1])),
            lambda: store.quarantine(pages.keys([1])),
            lambda: store.namespaces(),
        ):
            with pytest.raises(ClosedError, match="closed"):
                act()
