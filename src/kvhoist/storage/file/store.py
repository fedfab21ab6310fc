"""FileStore: pages in the segment files of one folder, the embedded default. Its format: docs/file-format.md."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvhoist.errors import ClosedError, StoreUnavailableError
from kvhoist.messages import StorageKey
from kvhoist.storage.base import Buffer, StoreStats
from kvhoist.storage.file.capacity import default_capacity_bytes, segment_bytes_for
from kvhoist.storage.file.direct import Direct
from kvhoist.storage.file.folder import FORMAT_FILE, Folder
from kvhoist.storage.file.index import Index
from kvhoist.storage.file.neighbours import Neighbours
from kvhoist.storage.file.reader import Reader
from kvhoist.storage.file.shelf import Place
from kvhoist.storage.file.sync import Syncer, interval_of
from kvhoist.storage.file.writer import Page, Writer
from kvhoist.storage.record import IDENTITY, identity_of, key_of, own_identity
from kvhoist.units import parse_bytes

_CLOSE_TIMEOUT_S = 30.0


class FileStore:
    """A Store in the folder `folder`, which several processes may share.

    `capacity` bounds the segment files that this process owns (default: see `default_capacity_bytes`); when it is
    reached, the least recently used pages of this process's own segments go. A page once confirmed survives the death
    of the process. With `fsync="batch"` it survives a power cut too, at the price of an fdatasync a batch and segment;
    with `"interval:SECONDS"` after so long and the fdatasync; with `"never"` when the kernel gets to it. Whatever does
    not is a miss, never wrong bytes. `direct`: `on` refuses a disk without O_DIRECT, `auto` does without it there, and
    for pages below 128 KiB, `off` everywhere: pages go through the page cache then. `read_only` writes nothing, not
    even locks: puts and removals raise StoreUnavailableError, `note_namespace` does nothing. When a key is not found,
    other processes' segments are looked at, at most every `refresh_s`. `orphan_grace_s`: see Neighbours.

    Raises ConfigError for options that cannot work and, before anything is changed, StorageError for a path that is a
    file or another's folder, StoreFormatError for another version, StoreUnavailableError for a folder without access,
    or without O_DIRECT for `direct="on"`.
    A forked child cannot use it: calls raise ClosedError there, and `close` does nothing.
    """

    name = "file"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        capacity: int | str | None = None,
        fsync: str = "never",
        direct: str = "auto",
        read_only: bool = False,
        refresh_s: float = 0.05,
        orphan_grace_s: float = 600.0,
    ) -> None:
        interval_s = interval_of(fsync)
        wanted = None if capacity is None else parse_bytes(capacity, name="capacity")
        if read_only:
            Folder.check(Path(folder))
        self._reach = Direct(Path(folder), direct, format_file=FORMAT_FILE)
        self._folder = Folder.open(Path(folder), read_only=read_only)
        try:
            capacity_bytes = default_capacity_bytes(self._folder.path) if wanted is None else wanted
        except OSError as error:
            raise self._unopened(error) from error
        self._read_only = read_only
        self._counts: Counter[str] = Counter()
        self._lock = threading.Condition()
        self._index = Index(capacity_bytes, segment_bytes_for(capacity_bytes))
        grow_lock = threading.Lock()
        self._syncer = Syncer(interval_s, self._lock, self._counts)
        self._writer = Writer(self._folder, self._index, self._lock, grow_lock, self._counts, self._reach, self._syncer)
        self._reader = Reader(self._index, self._lock, self._counts)
        self._neighbours = Neighbours(
            self._folder,
            self._index,
            self._lock,
            grow_lock,
            self._counts,
            self._reach,
            syncs=interval_s is not None,
            read_only=read_only,
            refresh_s=refresh_s,
            orphan_grace_s=orphan_grace_s,
        )
        self._closed = False
        self._pid = os.getpid()
        try:
            self._neighbours.start()
        except OSError as error:
            raise self._unopened(error) from error

    def __enter__(self) -> FileStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        return self._folder.path

    @property
    def is_direct(self) -> bool:
        """Whether pages, with `auto` those of 128 KiB and more, go past the page cache, as far as is known."""
        return self._reach.active

    @property
    def read_only(self) -> bool:
        return self._read_only

    def put(self, keys: Sequence[StorageKey], headers: Sequence[bytes], blobs: Sequence[Buffer]) -> list[bool]:
        self._check_writable()
        self._neighbours.refresh()
        pages = [
            Page(i, own_identity(key, header), header, blob)
            for i, (key, header, blob) in enumerate(zip(keys, headers, blobs, strict=True))
        ]
        held = self._writer.put(pages)
        return [page.number in held for page in pages]

    def get(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[bytes | None]:
        self._check_open()
        identities = self._refreshed(keys)
        headers, unreadable = self._reader.read(identities, blobs)
        if unreadable:
            self.quarantine([keys[number] for number in unreadable])
        return headers

    def exists(self, keys: Sequence[StorageKey]) -> list[bool]:
        self._check_open()
        identities = self._refreshed(keys)
        with self._lock:
            return [self._index.find(identity) is not None for identity in identities]

    def quarantine(self, keys: Sequence[StorageKey]) -> None:
        """Take records out of use: an owned one for good, one of another process until its owner writes to its slot.
        Where other segments hold the page too, another copy is served from then on."""
        self._check_open()
        identities = set(map(identity_of, keys))
        with self._lock:
            theirs = {identity for identity in identities if self._index.forget_served(identity)}
        count = len(theirs) + self._clear([*identities - theirs])
        with self._lock:
            self._counts["quarantined"] += count

    def remove(self, keys: Sequence[StorageKey]) -> int:
        """Forget the keys that lie in this process's own segments, and return how many."""
        self._check_writable()
        return self._clear([identity_of(key) for key in keys])

    def remove_namespace(self, namespace: bytes) -> int:
        """Forget a namespace's pages in this process's own segments, return how many, and free their disk space."""
        self._check_writable()
        with self._lock:
            identities = self._index.of_namespace(namespace)
        removed = self._clear(identities)
        self._writer.delete_empty()
        return removed

    def note_namespace(self, namespace: bytes, fields: Mapping[str, str]) -> None:
        self._check_open()
        if not self._read_only:
            self._folder.note_namespace(namespace, fields)

    def namespaces(self) -> dict[bytes, dict[str, str]]:
        self._check_open()
        return self._folder.namespaces()

    def forget_namespace_note(self, namespace: bytes) -> None:
        """Remove what `note_namespace` kept."""
        self._check_writable()
        self._folder.forget_namespace(namespace)

    def records(self) -> Iterator[tuple[StorageKey, bytes]]:
        """Yield the key and header of every page that can be read here, as far as they still stand on disk."""
        self._check_open()
        with self._lock:
            places = [*self._index.owned_pages(), *self._index.foreign.items()]
        for identity, place in places:
            header = self._header_at(place)
            if header[IDENTITY] == identity:
                yield key_of(identity), header

    def faults(self) -> dict[str, str]:
        """Return the segment files that cannot be used, by name, and why. Nothing was changed in them."""
        return dict(self._neighbours.faults)

    def segment_bytes(self) -> list[int]:
        """Return the lengths of the segment files that can be used, of whatever owner."""
        with self._lock:
            shelves = [*self._index.owned_shelves(), *self._index.foreign_shelves.values()]
            return [os.fstat(shelf.segment.fd).st_size for shelf in shelves]

    def num_segments(self) -> tuple[int, int]:
        """Return how many segments are this process's own, and how many it reads of others."""
        with self._lock:
            return len(self._index.owned_shelves()), len(self._index.foreign_shelves)

    def audit(self) -> None:
        """Recount the index. Raises StorageError where it does not add up. For tests; takes the lock all along."""
        with self._lock:
            self._index.audit()

    def stats(self) -> StoreStats:
        """`num_pages` counts all that can be read here; `used_bytes` and `capacity_bytes` this process's own."""
        with self._lock:
            return StoreStats(
                num_pages=self._index.num_owned_pages() + len(self._index.foreign),
                used_bytes=self._index.used_bytes(),
                capacity_bytes=self._index.capacity_bytes,
                put_pages=self._counts["put"],
                get_pages=self._counts["get"],
                missing_pages=self._counts["missing"],
                evicted_pages=self._index.num_evicted,
                quarantined_pages=self._counts["quarantined"],
                dropped_pages=self._counts["dropped"],
                error_pages=self._counts["error"],
            )

    def close(self) -> None:
        """Finish what was begun and close the files, which gives the segments to whoever opens the folder next."""
        if os.getpid() != self._pid:  # its locks may be held by threads that are not here
            return
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._index.pending, timeout=_CLOSE_TIMEOUT_S)
            self._index.closed = True
        self._syncer.flush()
        self._neighbours.wait_idle(_CLOSE_TIMEOUT_S)
        with self._lock:
            shelves = self._index.give_up_all()
        for shelf in shelves:
            shelf.close_if_unused(self._lock)

    def _refreshed(self, keys: Sequence[StorageKey]) -> list[bytes]:
        """Return the keys' identities, after a look at other processes' segments where one of them is not known."""
        identities = [identity_of(key) for key in keys]
        with self._lock:
            all_known = all(self._index.find(identity) is not None for identity in identities)
        if not all_known:
            self._neighbours.refresh()
        return identities

    def _clear(self, identities: Sequence[bytes]) -> int:
        """Take owned pages out of the index, clear their headers on disk, then free their slots."""
        with self._lock:
            places = [place for identity in identities if (place := self._index.unpublish(identity)) is not None]
            for place in places:
                place.shelf.num_writing += 1
        for place in places:
            try:
                place.shelf.segment.clear_headers([place.slot])
                cleared = True
            except OSError:
                cleared = False
            with self._lock:
                place.shelf.num_writing -= 1
                self._counts["error"] += not cleared
                self._index.give_back(place, stale=not cleared)
            place.shelf.close_if_unused(self._lock)
        return len(places)

    def _header_at(self, place: Place) -> bytes:
        with self._lock:
            if place.shelf.closed or place.shelf.gone:
                return b""
            place.shelf.num_users += 1
        try:
            return place.shelf.segment.read_headers(place.slot, 1)[0]
        except OSError:
            return b""
        finally:
            with self._lock:
                place.shelf.num_users -= 1
            place.shelf.close_if_unused(self._lock)

    def _unopened(self, error: OSError) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"the segments in {self._folder.path} cannot be opened", got=error, remedy="Check their owner and mode."
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the store in {self._folder.path} was closed", remedy="Open it again with open_store().")
        if os.getpid() != self._pid:
            raise ClosedError("this store is of the process that this one was forked from", remedy="Open it in each.")

    def _check_writable(self) -> None:
        self._check_open()
        if self._read_only:
            raise StoreUnavailableError(
                f"the store in {self._folder.path} was opened read-only", remedy="Open it without read_only to write."
            )
