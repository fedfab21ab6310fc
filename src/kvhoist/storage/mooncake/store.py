"""MooncakeStore: records in the memory of many machines, through the transfer engine, without a copy where it can."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvhoist.errors import ClosedError
from kvhoist.messages import StorageKey
from kvhoist.storage.base import Buffer, StoreStats, address_of
from kvhoist.storage.mooncake import notes
from kvhoist.storage.mooncake.client import BAD_LENGTH, NO_ROOM, NOT_FOUND, NOT_READY, OK, open_client, release
from kvhoist.storage.mooncake.options import MooncakeOptions
from kvhoist.storage.record import HEADER_BYTES, identity_of

_log = logging.getLogger(__name__)

_PREFIX = "kvhoist1"
_HEADER_ROOM = memoryview(bytes(HEADER_BYTES))
_NO_HEADER = b""
"""In the place of the header of a record of another length than its reader expects: no check passes it."""


@dataclass(slots=True)
class _Batch:
    """Some pages of a call: where the engine finds or puts header and blob of each, and how many bytes."""

    names: list[str] = field(default_factory=list)
    headers: list[Buffer] = field(default_factory=list)
    blobs: list[Buffer] = field(default_factory=list)
    copies: list[Buffer | None] = field(default_factory=list)
    addresses: list[list[int]] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)


class MooncakeStore:
    """A Store in the objects of a Mooncake Store, shared by all who use the same master. Thread-safe.

    A record is one object, header first, written from and read into two buffers at once: it becomes visible as a whole.
    Blobs in registered memory are moved without a copy, others through the client's pool. Removing does not wait for
    readers: what they read then fails the check. `stats` counts what this store did; its gauges know nothing of what
    others put or the master evicted.
    """

    name = "mooncake"

    def __init__(self, options: MooncakeOptions) -> None:
        """Connect. Raises MissingDependencyError, and StoreUnavailableError where the master does not answer."""
        self._client = open_client(options)
        self._options = options
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._settled = threading.Condition()
        self._pending: set[str] = set()
        self._registered: list[tuple[int, int]] = []
        self._closed = False

    def register(self, memory: Buffer) -> None:
        """Let pages inside of `memory` be moved without a copy, until `unregister` or `close`. Its owner keeps it alive
        so long; the store holds its address only. Where the engine refuses, pages are copied, and the log says so."""
        self._check_open()
        region = (address_of(memory), len(memory))
        if self._client.register(*region):
            self._registered.append(region)
        else:
            _log.warning("Mooncake's engine refused to register %d bytes: pages there will be copied", len(memory))

    def unregister(self, memory: Buffer) -> None:
        """Take `register` back, before the memory is freed. Fine for memory that is not registered."""
        region = (address_of(memory), len(memory))
        if not self._closed and region in self._registered:
            self._registered.remove(region)
            self._client.unregister(*region)

    def put(self, keys: Sequence[StorageKey], headers: Sequence[bytes], blobs: Sequence[Buffer]) -> list[bool]:
        names = self._names(keys)
        with self._claimed(names) as mine:
            outcome = dict(zip(mine, self._client.held(list(mine)) if mine else [], strict=True))
            new = [i for name, i in mine.items() if not outcome[name]]
            new_headers = [memoryview(headers[i]) for i in new]
            for batch in self._batches([names[i] for i in new], new_headers, [blobs[i] for i in new]):
                codes = self._put(batch)
                outcome.update((name, code == OK) for name, code in zip(batch.names, codes, strict=True))
        others = [name for name in names if name not in outcome]
        if others:
            with self._settled:
                self._settled.wait_for(lambda: self._pending.isdisjoint(others))
            outcome.update(zip(others, self._client.held(others), strict=True))
        return [outcome[name] for name in names]

    def get(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[bytes | None]:
        names = self._names(keys)
        found: list[bytes | None] = []
        for batch in self._batches(names, [_HEADER_ROOM] * len(names), blobs):
            found += self._get(batch)
        return found

    def exists(self, keys: Sequence[StorageKey]) -> list[bool]:
        names = self._names(keys)
        return self._client.held(names) if names else []

    def quarantine(self, keys: Sequence[StorageKey]) -> None:
        self._count(quarantined=self._remove(keys))

    def remove(self, keys: Sequence[StorageKey]) -> int:
        return self._remove(keys)

    def remove_namespace(self, namespace: bytes) -> int:
        self._check_open()
        pattern = f"^{_PREFIX}/{namespace.hex()}/.*$"
        (removed,) = self._client.codes(lambda engine: [engine.remove_by_regex(pattern, True)])
        self._count(removed=max(0, removed))
        return max(0, removed)

    def note_namespace(self, namespace: bytes, fields: Mapping[str, str]) -> None:
        self._check_open()
        notes.write_note(self._client, namespace, fields)

    def namespaces(self) -> dict[bytes, dict[str, str]]:
        self._check_open()
        return notes.read_notes(self._client)

    def stats(self) -> StoreStats:
        with self._lock:
            counts = Counter(self._counts)
        num_pages = max(0, counts["put"] - counts["removed"])
        return StoreStats(
            num_pages=num_pages,
            used_bytes=num_pages * counts["put_bytes"] // max(1, counts["put"]),
            capacity_bytes=int(self._options.segment),
            put_pages=counts["put"],
            get_pages=counts["get"],
            missing_pages=counts["missing"],
            quarantined_pages=counts["quarantined"],
            dropped_pages=counts["dropped"],
            error_pages=counts["error"],
        )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for region in self._registered:
            with contextlib.suppress(ClosedError):  # of a forked child: the client is its parent's
                self._client.unregister(*region)
        release(self._client)

    def _names(self, keys: Sequence[StorageKey]) -> list[str]:
        self._check_open()
        return [name_of(key) for key in keys]

    def _batches(self, names: Sequence[str], headers: Sequence[Buffer], blobs: Sequence[Buffer]) -> Iterator[_Batch]:
        """Cut a call into parts whose place in the pool leaves room for other threads, and in which no object is named
        twice: the engine fills one of its buffers only."""
        batch, needed, seen = _Batch(), 0, set[str]()
        for name, header, blob in zip(names, headers, blobs, strict=True):
            flat = memoryview(blob).cast("B")
            place = address_of(flat) if len(flat) else 0
            known = not len(flat) or self._client.regions.holds(place, len(flat))
            need = HEADER_BYTES + (0 if known else len(flat))
            if batch.names and (name in seen or needed + need > self._client.pool.max_piece_bytes // 2):
                yield batch
                batch, needed, seen = _Batch(), 0, set[str]()
            seen.add(name)
            batch.names.append(name)
            batch.headers.append(header)
            batch.blobs.append(flat)
            batch.addresses.append([0, place if known else 0])
            batch.lengths.append([len(header), len(flat)])
            needed += need
        if batch.names:
            yield batch

    @contextlib.contextmanager
    def _placed(self, batch: _Batch) -> Iterator[list[Buffer]]:
        """Give headers, and blobs that the engine does not know, a place in the pool; yields the headers' views."""
        copied = [i for i, (_, place) in enumerate(batch.addresses) if not place and batch.lengths[i][1]]
        num_bytes = sum(lengths[0] for lengths in batch.lengths) + sum(batch.lengths[i][1] for i in copied)
        batch.copies = [None] * len(batch.blobs)
        with self._client.pool.piece(num_bytes, 4.0 * self._options.timeout_s) as (start, view):
            views, offset = [], 0
            for lengths, addresses in zip(batch.lengths, batch.addresses, strict=True):
                addresses[0] = start + offset
                views.append(view[offset : offset + lengths[0]])
                offset += lengths[0]
            for i in copied:
                batch.addresses[i][1] = start + offset
                batch.copies[i] = view[offset : offset + batch.lengths[i][1]]
                offset += batch.lengths[i][1]
            try:
                yield views
            finally:
                for part in (*views, *filter(None, batch.copies)):
                    part.release()

    @contextlib.contextmanager
    def _claimed(self, names: Sequence[str]) -> Iterator[dict[str, int]]:
        """Yield the names that no other thread is putting, each with its first index: the engine says that an object
        is there while it is still being written."""
        with self._settled:
            mine = {name: i for i, name in reversed(list(enumerate(names))) if name not in self._pending}
            self._pending.update(mine)
        try:
            yield mine
        finally:
            with self._settled:
                self._pending.difference_update(mine)
                self._settled.notify_all()

    def _put(self, batch: _Batch) -> list[int]:
        with self._placed(batch) as header_views:
            for view, header in zip(header_views, batch.headers, strict=True):
                view[:] = header
            for copy, blob in zip(batch.copies, batch.blobs, strict=True):
                if copy is not None:
                    copy[:] = blob
            places, lengths = _parts(batch)
            codes = self._client.codes(
                lambda engine: engine.batch_put_from_multi_buffers(batch.names, places, lengths, self._client.replicate)
            )
        self._count_put(codes, batch)
        return codes

    def _get(self, batch: _Batch) -> list[bytes | None]:
        found: list[bytes | None] = []
        with self._placed(batch) as header_views:
            places, lengths = _parts(batch)
            codes = self._client.codes(lambda engine: engine.batch_get_into_multi_buffers(batch.names, places, lengths))
            for i, code in enumerate(codes):
                good = code == sum(batch.lengths[i])
                copy = batch.copies[i]
                if good and copy is not None:
                    batch.blobs[i][:] = copy
                found.append(bytes(header_views[i]) if good else None)
        for i, code in enumerate(codes):
            if code in BAD_LENGTH and self._has_other_length(batch.names[i], sum(batch.lengths[i])):
                found[i] = _NO_HEADER
        self._count_got(codes)
        return found

    def _has_other_length(self, name: str, num_bytes: int) -> bool:
        (held_bytes,) = self._client.codes(lambda engine: [engine.get_size(name)])
        return held_bytes >= 0 and held_bytes != num_bytes

    def _remove(self, keys: Sequence[StorageKey]) -> int:
        names = self._names(keys)
        codes = self._client.codes(lambda engine: engine.batch_remove(names, True)) if names else []
        removed = codes.count(OK)
        self._count(removed=removed)
        return removed

    def _count_put(self, codes: Sequence[int], batch: _Batch) -> None:
        good = [sum(lengths) for code, lengths in zip(codes, batch.lengths, strict=True) if code == OK]
        dropped = codes.count(NO_ROOM)
        self._count(put=len(good), put_bytes=sum(good), dropped=dropped, error=len(codes) - len(good) - dropped)

    def _count_got(self, codes: Sequence[int]) -> None:
        good = sum(code >= 0 for code in codes)
        missing = sum(code in (NOT_FOUND, NOT_READY) for code in codes)
        self._count(get=good, missing=missing, error=len(codes) - good - missing)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this store was closed", remedy="Open it again with open_store().")


def name_of(key: StorageKey) -> str:
    """Return the object's name of a key: readable, of safe characters only, different for different keys. Raises
    ConfigError for a key that no record can have."""
    identity_of(key)
    (namespace, group, chain_hash), (rank, num_ranks) = key
    return f"{_PREFIX}/{namespace.hex()}/{group}/{chain_hash.hex()}/{rank}-{num_ranks}"


def _parts(batch: _Batch) -> tuple[list[list[int]], list[list[int]]]:
    """Return addresses and lengths without those of empty blobs."""
    places = [[a for a, n in zip(*pair, strict=True) if n] for pair in zip(batch.addresses, batch.lengths, strict=True)]
    return places, [[n for n in lengths if n] for lengths in batch.lengths]
