"""Pages with known bytes, a FileStore folder that is audited when a test ends, damaged segment files, a Mooncake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mooncake_support import Master, running_master

from kvhoist import testing
from kvhoist.storage import FileStore, MooncakeStore, Sealer, StorageIO, Store, open_store
from kvhoist.storage.file import direct
from kvhoist.storage.record import HEADER_BYTES

NUM = 12
TABLE_AT = 8192
PITCH = 8192
"""The pitch of pages of 6000 bytes."""


class Pages(testing.Pages):
    """Pages that are read as the data plane reads them, and whose damage is judged."""

    def fetch(self, store: Store, sealer: Sealer | None = None) -> tuple[list[str], list[memoryview]]:
        """Prefetch pages 0 to NUM - 1 as the data plane does; return each one's outcome and bytes."""
        io = StorageIO(store, sealer or self.sealer, num_threads=1)
        buffers = [memoryview(bytearray(self.page_bytes)) for _ in range(NUM)]
        outcomes = io.prefetch(self.keys(range(NUM)), buffers).result(20)
        assert io.close()
        for i, reason in enumerate(outcomes.reasons):
            assert reason is not None or sealer is not None or buffers[i] == self.blob(i), "wrong bytes passed"
        return ["good" if reason is None else reason for reason in outcomes.reasons], buffers

    def check_usable(self, store: FileStore, bad: set[int]) -> None:
        """The damaged pages are gone, the others are served, and all can be stored again."""
        assert store.exists(self.keys(range(NUM))) == [i not in bad for i in range(NUM)]
        assert all(self.put(store, range(NUM + 5)))
        assert self.read(store, range(NUM + 5)) == ["good"] * (NUM + 5)
        store.audit()


@pytest.fixture(autouse=True)
def direct_for_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the small pages of tests go past the page cache, as large ones do, where the file system can do that."""
    monkeypatch.setattr(direct, "DIRECT_FROM_BYTES", 0)


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def pages_of() -> type[Pages]:
    return Pages


class Stores:
    """Opens FileStores of one folder, and audits and closes them when the test ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: list[FileStore] = []

    def open(self, **options: Any) -> FileStore:
        options.setdefault("capacity", "8MiB")
        options.setdefault("refresh_s", 0.0)
        store = FileStore(self.folder, **options)
        self._open.append(store)
        return store

    def segments(self) -> list[Path]:
        return sorted((self.folder / "segments").glob("*.seg"))

    def finish(self) -> None:
        for store in self._open:
            store.audit()
            store.close()


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    stores = Stores(tmp_path / "store")
    yield stores
    stores.finish()


class SegmentFile:
    """A closed segment file, to be damaged: page `i` lies in slot `i`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = bytearray(path.read_bytes())
        num_slots = int.from_bytes(self.bytes[56:64], "little")
        self.blobs_at = len(self.bytes) - num_slots * PITCH

    def header(self, i: int) -> slice:
        return slice(TABLE_AT + i * HEADER_BYTES, TABLE_AT + (i + 1) * HEADER_BYTES)

    def blob(self, i: int) -> slice:
        return slice(self.blobs_at + i * PITCH, self.blobs_at + i * PITCH + 6000)

    def swap(self, a: slice, b: slice) -> None:
        self.bytes[a], self.bytes[b] = self.bytes[b], self.bytes[a]

    def save(self) -> None:
        self.path.write_bytes(self.bytes)


@pytest.fixture
def segment_file() -> type[SegmentFile]:
    return SegmentFile


@pytest.fixture
def damage(stores: Any, pages: Any) -> Callable[[Callable[[SegmentFile], None]], Any]:
    """Store NUM pages, close, damage the segment file, and return the store opened again."""

    def run(act: Callable[[SegmentFile], None]) -> Any:
        store = stores.open(capacity="1MiB")
        assert all(pages.put(store, range(NUM)))
        store.close()
        file = SegmentFile(stores.segments()[0])
        act(file)
        file.save()
        return stores.open(capacity="1MiB")

    return run


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with running_master(tmp_path_factory.mktemp("master")) as master:
        yield master


@pytest.fixture(scope="module")
def mooncake(master: Master) -> Iterator[MooncakeStore]:
    """A store that keeps the process's client: to close one takes the engine seconds."""
    store = open_store(master.url())
    assert isinstance(store, MooncakeStore)
    yield store
    store.close()
