"""Pages whose keys and bytes follow from a number, so that whatever comes back can be judged."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvhoist.messages import WHOLE, PageKey, Shard, StorageKey
from kvhoist.storage import Sealer, Store


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
        """Seal and put the pages, as the I/O threads do."""
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
