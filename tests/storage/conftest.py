"""Pages with known bytes, and a FileStore folder that is audited when a test ends."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvhoist.messages import WHOLE, PageKey, Shard, StorageKey
from kvhoist.storage import FileStore, Sealer, Store


@dataclass
class Pages:
    """Page `i` has key `key(i)` and the bytes `blob(i)`, which depend on `i` alone."""

    page_bytes: int = 6000
    namespace: bytes = bytes(range(32))
    group: int = 0
    shard: Shard = WHOLE
    sealer: Sealer = field(default_factory=Sealer)

    def key(self, i: int) -> StorageKey:
        return StorageKey(PageKey(self.namespace, self.group, hashlib.sha256(b"%d" % i).digest()), self.shard)

    def keys(self, ids: Sequence[int]) -> list[StorageKey]:
        return [self.key(i) for i in ids]

    def blob(self, i: int) -> memoryview:
        seed = hashlib.sha256(b"blob %d" % i).digest()
        return memoryview((seed * (self.page_bytes // 32 + 1))[: self.page_bytes])

    def put(self, store: Store, ids: Sequence[int]) -> list[bool]:
        blobs = [self.blob(i) for i in ids]
        headers = [self.sealer.seal(self.key(i), blob) for i, blob in zip(ids, blobs, strict=True)]
        return store.put(self.keys(ids), headers, blobs)

    def read(self, store: Store, ids: Sequence[int]) -> list[str]:
        """Return per page "good", "missing", "WRONG" (passed the check with other bytes), or the check's reason."""
        buffers = [memoryview(bytearray(self.page_bytes)) for _ in ids]
        headers = store.get(self.keys(ids), buffers)
        return [self._judge(i, header, buffer) for i, header, buffer in zip(ids, headers, buffers, strict=True)]

    def _judge(self, i: int, header: bytes | None, buffer: memoryview) -> str:
        if header is None:
            return "missing"
        reason = self.sealer.check(self.key(i), header, buffer)
        if reason is not None:
            return reason
        return "good" if buffer == self.blob(i) else "WRONG"


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
