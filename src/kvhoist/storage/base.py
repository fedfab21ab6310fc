"""What a store is: a place that keeps records (a header and a blob) by storage key.

A store moves bytes; it does not judge them. Headers are made and checked by `storage/record.py` on the I/O threads, so
that no store can forget to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvhoist.messages import StorageKey

Buffer = memoryview
"""Contiguous bytes (format "B"). The caller owns them and keeps them alive and unchanged until the call returns."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's counters since it was opened; gauges where the name says so."""

    num_pages: int  # gauge
    used_bytes: int  # gauge
    capacity_bytes: int  # gauge
    put_pages: int = 0
    get_pages: int = 0
    missing_pages: int = 0
    evicted_pages: int = 0
    quarantined_pages: int = 0
    dropped_pages: int = 0  # puts that found no room
    error_pages: int = 0


class Store(Protocol):
    """Batched, blocking, thread-safe: called from the bounded I/O pool only, several calls at once.

    One page's fault is that page's `False` or `None`; an exception means that the whole call failed (StorageError).

    A store that moves bytes without a copy may have two more methods, `register(memory)` and `unregister(memory)`, each
    with a `Buffer`: pages will lie inside of that memory between the two calls (`register_memory`).
    """

    name: str

    def put(self, keys: Sequence[StorageKey], headers: Sequence[bytes], blobs: Sequence[Buffer]) -> list[bool]:
        """Keep each record under its key, replacing none: a key already held answers True without writing. A record is
        visible to `get`, here and in other processes, as a whole or not at all. False: no room, or an I/O error."""
        ...

    def get(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[bytes | None]:
        """Read each blob into its buffer and return its header's bytes, unverified; None where it is not held or cannot
        be read. The buffer of a missing page may have been written."""
        ...

    def exists(self, keys: Sequence[StorageKey]) -> list[bool]:
        """Tell which keys are probably held. Cheap (memory where possible); a hint: only `get` and the check prove."""
        ...

    def quarantine(self, keys: Sequence[StorageKey]) -> None:
        """Take records that failed the check out of use and count them; absent keys are ignored."""
        ...

    def remove(self, keys: Sequence[StorageKey]) -> int:
        """Forget the keys and return how many were held."""
        ...

    def remove_namespace(self, namespace: bytes) -> int:
        """Forget all pages of a namespace (that this process may remove) and return how many."""
        ...

    def note_namespace(self, namespace: bytes, fields: Mapping[str, str]) -> None:
        """Keep what a namespace digest stands for, so that `explain` can later say which field differs. Idempotent."""
        ...

    def namespaces(self) -> dict[bytes, dict[str, str]]:
        """Return the fields of every namespace noted here, by digest."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Finish what was begun and release files. Idempotent; later calls raise ClosedError."""
        ...


def address_of(buffer: Buffer) -> int:
    """Return where a buffer of one byte at least lies. It may be read-only."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def register_memory(store: Store, memory: Buffer) -> None:
    """Tell a store that can use it where pages will lie. Called by who owns both memory and store; undo it with
    `unregister_memory` before the memory is freed. Raises what the store raises."""
    register = getattr(store, "register", None)
    if register is not None:
        register(memory)


def unregister_memory(store: Store, memory: Buffer) -> None:
    """Undo `register_memory`. Fine for memory that is not registered, and for a closed store."""
    unregister = getattr(store, "unregister", None)
    if unregister is not None:
        unregister(memory)
