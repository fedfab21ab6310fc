"""A store that breaks when it is told to: what `kvhoist bench storage --part faults` puts before a FileStore."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvhoist.errors import StoreUnavailableError
from kvhoist.messages import StorageKey
from kvhoist.storage.base import Buffer, Store, StoreStats

FAULTS = ("killed", "fails", "short", "hangs", "slow")
"""Calls raise at once that the store is gone; raise an I/O error; answer for fewer pages; return when the fault is
over; take `slow_s`."""

_T = TypeVar("_T")


class FaultyStore:
    """`store`, with whose calls something is the matter within `broken`. Thread-safe; does not close `store`."""

    def __init__(self, store: Store, slow_s: float) -> None:
        self.name = store.name
        self._store = store
        self._slow_s = slow_s
        self._fault = ""
        self._over = threading.Event()

    @contextmanager
    def broken(self, fault: str) -> Iterator[None]:
        """Let one of FAULTS be the matter meanwhile."""
        self._over = threading.Event()
        self._fault = fault
        try:
            yield
        finally:
            self._fault = ""
            self._over.set()

    def put(self, keys: Sequence[StorageKey], headers: Sequence[bytes], blobs: Sequence[Buffer]) -> list[bool]:
        return self._short(self._suffer(self._store.put, keys, headers, blobs))

    def get(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[bytes | None]:
        return self._short(self._suffer(self._store.get, keys, blobs))

    def exists(self, keys: Sequence[StorageKey]) -> list[bool]:
        return self._short(self._suffer(self._store.exists, keys))

    def quarantine(self, keys: Sequence[StorageKey]) -> None:
        self._suffer(self._store.quarantine, keys)

    def remove(self, keys: Sequence[StorageKey]) -> int:
        return self._suffer(self._store.remove, keys)

    def remove_namespace(self, namespace: bytes) -> int:
        return self._suffer(self._store.remove_namespace, namespace)

    def note_namespace(self, namespace: bytes, fields: Mapping[str, str]) -> None:
        self._suffer(self._store.note_namespace, namespace, fields)

    def namespaces(self) -> dict[bytes, dict[str, str]]:
        return self._suffer(self._store.namespaces)

    def stats(self) -> StoreStats:
        return self._store.stats()

    def close(self) -> None:
        self._over.set()

    def _suffer(self, call: Callable[..., _T], *arguments: Any) -> _T:
        fault = self._fault
        if fault == "killed":
            raise StoreUnavailableError("the benchmark took this store away")
        if fault == "fails":
            raise OSError(errno.EIO, "the benchmark broke this store")
        if fault == "hangs":
            self._over.wait()
        if fault == "slow":
            time.sleep(self._slow_s)
        return call(*arguments)

    def _short(self, answers: list[_T]) -> list[_T]:
        return answers[:-1] if self._fault == "short" else answers
