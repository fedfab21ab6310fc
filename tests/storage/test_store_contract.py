"""Every store that ships keeps the contract of `kvhoist.testing.store_suite`; and what each has of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mooncake_support import Master

from kvhoist.storage import FileStore, MemoryStore, MooncakeStore, Store, open_store
from kvhoist.testing.store_suite import StoreSuite


class TestMemoryStore(StoreSuite):
    shared = False

    def open(self, place: Path) -> Store:
        return MemoryStore("16MiB")


class TestFileStore(StoreSuite):
    fsync = "never"

    def open(self, place: Path) -> Store:
        return FileStore(place / "store", capacity="16MiB", fsync=self.fsync, refresh_s=0.0)


class TestDurableFileStore(TestFileStore):
    fsync = "batch"


class TestMooncakeStore(StoreSuite):
    address = ""

    @pytest.fixture(autouse=True)
    def _empty(self, master: Master, mooncake: MooncakeStore) -> None:
        self.address = master.url()
        mooncake._client.call(lambda engine: engine.remove_all(True))

    def open(self, place: Path) -> Store:
        return open_store(self.address)


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
