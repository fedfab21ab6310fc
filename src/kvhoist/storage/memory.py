"""A store in this process's memory: for tests, and for one process that wants a second, evicting tier."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from kvhoist.errors import ClosedError
from kvhoist.messages import StorageKey
from kvhoist.storage.base import Buffer, StoreStats
from kvhoist.units import parse_bytes


class MemoryStore:
    """Records in a dict, least recently used evicted first; `capacity` counts headers and blobs.

    Thread-safe. Copies what it is given, so nothing of the caller's memory is kept.
    """

    name = "memory"

    def __init__(self, capacity: int | str = "1GiB") -> None:
        self._capacity_bytes = parse_bytes(capacity, name="capacity")
        self._records: OrderedDict[StorageKey, tuple[bytes, bytes]] = OrderedDict()
        self._namespaces: dict[bytes, dict[str, str]] = {}
        self._used_bytes = 0
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closed = False

    def put(self, keys: Sequence[StorageKey], headers: Sequence[bytes], blobs: Sequence[Buffer]) -> list[bool]:
        self._check_open()
        return [self._put(*record) for record in zip(keys, headers, blobs, strict=True)]

    def get(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[bytes | None]:
        self._check_open()
        return [self._get(key, blob) for key, blob in zip(keys, blobs, strict=True)]

    def exists(self, keys: Sequence[StorageKey]) -> list[bool]:
        self._check_open()
        with self._lock:
            return [key in self._records for key in keys]

    def quarantine(self, keys: Sequence[StorageKey]) -> None:
        self._check_open()
        with self._lock:
            self._counts["quarantined"] += sum(self._drop(key) for key in keys)

    def remove(self, keys: Sequence[StorageKey]) -> int:
        self._check_open()
        with self._lock:
            return sum(self._drop(key) for key in keys)

    def remove_namespace(self, namespace: bytes) -> int:
        self._check_open()
        with self._lock:
            return sum(self._drop(key) for key in list(self._records) if key.page.namespace == namespace)

    def note_namespace(self, namespace: bytes, fields: Mapping[str, str]) -> None:
        self._check_open()
        with self._lock:
            self._namespaces[namespace] = dict(fields)

    def namespaces(self) -> dict[bytes, dict[str, str]]:
        self._check_open()
        with self._lock:
            return {digest: dict(fields) for digest, fields in self._namespaces.items()}

    def records(self) -> Iterator[tuple[StorageKey, bytes]]:
        """Yield every key with its header, as they were when iteration began."""
        self._check_open()
        with self._lock:
            records = [(key, header) for key, (header, _) in self._records.items()]
        yield from records

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                num_pages=len(self._records),
                used_bytes=self._used_bytes,
                capacity_bytes=self._capacity_bytes,
                put_pages=self._counts["put"],
                get_pages=self._counts["get"],
                missing_pages=self._counts["missing"],
                evicted_pages=self._counts["evicted"],
                quarantined_pages=self._counts["quarantined"],
                dropped_pages=self._counts["dropped"],
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._records.clear()
            self._used_bytes = 0

    def _put(self, key: StorageKey, header: bytes, blob: Buffer) -> bool:
        record_bytes = len(header) + len(blob)
        with self._lock:
            if key in self._records:
                self._records.move_to_end(key)
                return True
            if record_bytes > self._capacity_bytes:
                self._counts["dropped"] += 1
                return False
        record = (bytes(header), bytes(blob))
        with self._lock:
            self._drop(key)
            while self._used_bytes + record_bytes > self._capacity_bytes:
                self._drop(next(iter(self._records)))
                self._counts["evicted"] += 1
            self._records[key] = record
            self._used_bytes += record_bytes
            self._counts["put"] += 1
        return True

    def _get(self, key: StorageKey, blob: Buffer) -> bytes | None:
        with self._lock:
            record = self._records.get(key)
            if record is None:
                self._counts["missing"] += 1
                return None
            self._records.move_to_end(key)
            self._counts["get"] += 1
        header, kept = record
        length = min(len(blob), len(kept))
        blob[:length] = kept[:length]
        return header

    def _drop(self, key: StorageKey) -> bool:
        record = self._records.pop(key, None)
        if record is None:
            return False
        self._used_bytes -= len(record[0]) + len(record[1])
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this store was closed", remedy="Open it again with open_store().")
