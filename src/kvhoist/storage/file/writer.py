"""How pages get into segments: a slot is found or made, then blob, header, index. No I/O under the lock."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvhoist.storage.base import Buffer
from kvhoist.storage.file.direct import Direct
from kvhoist.storage.file.folder import Folder
from kvhoist.storage.file.index import Index
from kvhoist.storage.file.segment import Segment, is_no_space, pitch_of, runs_of, slots_that_fit
from kvhoist.storage.file.shelf import Place, Shelf
from kvhoist.storage.file.sync import Syncer

_FULL_DISK_PAUSE_S = 5.0
_MAX_RUN_PAGES = 512  # a blob and its padding each, within the 1024 buffers of one pwritev

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """A page on its way to disk, or to be read from it; `number` is its index in the caller's batch."""

    number: int
    identity: bytes
    header: bytes
    blob: Buffer


class Writer:
    """Puts pages into owned segments: free slots first, then new segments within capacity, then eviction.

    `lock` guards `index` and `counts`, and is notified whenever pending pages are settled; `grow_lock` is held while
    segments are made or deleted, and taken before `lock`.
    """

    def __init__(
        self,
        folder: Folder,
        index: Index,
        lock: threading.Condition,
        grow_lock: threading.Lock,
        counts: Counter[str],
        direct: Direct,
        syncer: Syncer,
    ) -> None:
        self._folder = folder
        self._index = index
        self._lock = lock
        self._counts = counts
        self._direct = direct
        self._syncer = syncer
        self._grow_lock = grow_lock
        self._full_until = 0.0

    def put(self, pages: Sequence[Page]) -> set[int]:
        """Write the pages that are not held, nor on their way by another thread; return the numbers of those held when
        all are settled."""
        held: set[int] = set()
        writing, waiting = [], []
        with self._lock:
            for page in pages:
                place = self._index.find(page.identity)
                if place is not None:
                    self._index.touch(page.identity, place)
                    held.add(page.number)
                elif page.identity in self._index.pending:
                    waiting.append(page)
                else:
                    self._index.pending.add(page.identity)
                    writing.append(page)
        held |= self._write(writing)
        with self._lock:
            self._lock.wait_for(lambda: not any(page.identity in self._index.pending for page in waiting))
            return held | {page.number for page in waiting if self._index.find(page.identity) is not None}

    def _write(self, pages: Sequence[Page]) -> set[int]:
        """Write pages whose identities stand in `index.pending`; return the numbers of those now held."""
        held: set[int] = set()
        try:
            for pitch_bytes in sorted({pitch_of(len(page.blob)) for page in pages}):
                alike = [page for page in pages if pitch_of(len(page.blob)) == pitch_bytes]
                held |= self._write_alike(pitch_bytes, alike)
        finally:
            with self._lock:
                self._index.pending.difference_update(page.identity for page in pages)
                self._lock.notify_all()
        return held

    def delete_empty(self) -> None:
        """Delete the owned segments that hold no page."""
        with self._grow_lock:
            with self._lock:
                shelves = self._index.drop_empty()
            for shelf in shelves:
                self._delete(shelf)

    def _write_alike(self, pitch_bytes: int, pages: Sequence[Page]) -> set[int]:
        places = self._allocate(pitch_bytes, len(pages))
        with self._lock:
            self._counts["dropped"] += len(pages) - len(places)
        pairs = list(zip(places, pages, strict=False))
        held: set[int] = set()
        by_shelf: dict[int, list[tuple[Place, Page]]] = {}
        for pair in pairs:
            by_shelf.setdefault(id(pair[0].shelf), []).append(pair)
        for group in by_shelf.values():
            held |= self._write_shelf(group[0][0].shelf, {place.slot: (place, page) for place, page in group})
        return held

    def _write_shelf(self, shelf: Shelf, pages: dict[int, tuple[Place, Page]]) -> set[int]:
        """Write into given-out slots of one segment, publish what succeeded and free the rest."""
        good: set[int] = set()
        try:
            good = self._store(shelf, pages)
        finally:
            with self._lock:
                shelf.num_writing -= len(pages)
                for slot, (place, page) in pages.items():
                    if slot in good:
                        shelf.stale.discard(slot)
                        self._index.publish(page.identity, place)
                    else:
                        self._index.give_back(place, stale=True)
                self._counts["put"] += len(good)
            shelf.close_if_unused(self._lock)
        return {pages[slot][1].number for slot in good}

    def _store(self, shelf: Shelf, pages: dict[int, tuple[Place, Page]]) -> set[int]:
        segment = shelf.segment
        with self._lock:
            stale = shelf.stale.intersection(pages)

        def write_blobs(slots: Sequence[int]) -> None:
            segment.clear_headers([slot for slot in slots if slot in stale])
            segment.write_blobs(slots[0], [pages[slot][1].blob for slot in slots])

        def write_headers(slots: Sequence[int]) -> None:
            segment.write_headers(slots[0], [pages[slot][1].header for slot in slots])

        good = self._each_run(self._each_run(sorted(pages), write_blobs), write_headers)
        try:
            if good:
                self._syncer.wrote(shelf)
        except OSError as error:
            self._note_failure(error, len(good))
            return set()
        return set(good)

    def _each_run(self, slots: Sequence[int], act: Callable[[Sequence[int]], None]) -> list[int]:
        """Run `act` on each run of neighbouring slots, slot by slot where that fails; return the good slots."""
        good: list[int] = []
        for run in runs_of(slots):
            for part in (run[i : i + _MAX_RUN_PAGES] for i in range(0, len(run), _MAX_RUN_PAGES)):
                try:
                    act(part)
                    good += part
                except OSError as error:
                    if len(part) > 1:
                        good += [slot for single in part for slot in self._each_run([single], act)]
                    else:
                        self._note_failure(error, 1)
        return good

    def _allocate(self, pitch_bytes: int, count: int) -> list[Place]:
        """Return up to `count` slots that are this call's alone."""
        with self._lock:
            places = self._index.take(pitch_bytes, count)
        if len(places) == count or not slots_that_fit(self._index.capacity_bytes, pitch_bytes):
            return places
        with self._grow_lock:
            while True:
                with self._lock:
                    places += self._index.take(pitch_bytes, count - len(places))
                if len(places) == count or not self._make_room(pitch_bytes, count - len(places)):
                    return places

    def _make_room(self, pitch_bytes: int, count: int) -> bool:
        """Free or make at least one slot, or at least some capacity; False where nothing more can be done."""
        with self._lock:
            if self._index.closed:
                return False
            num_slots = self._index.growth(pitch_bytes) if time.monotonic() >= self._full_until else 0
        if num_slots and self._create(pitch_bytes, num_slots):
            return True
        with self._lock:
            victim = self._index.victim(pitch_bytes)
            if victim is None:
                return self._index.evict(pitch_bytes, count) > 0
            self._index.drop_shelf(victim)
        self._delete(victim)
        self._full_until = 0.0
        return True

    def _create(self, pitch_bytes: int, num_slots: int) -> bool:
        """Add a segment of `num_slots`, or of fewer where the disk has no room for them; then no other for a while, so
        that a full disk does not fill with ever smaller ones."""
        wanted = num_slots
        while num_slots:
            try:
                folder = self._folder
                segment = Segment.create(
                    folder.segments, folder.store_id, pitch_bytes, num_slots, self._direct, folder.file_mode
                )
            except OSError as error:
                num_slots = num_slots // 4 if is_no_space(error) else 0
                if num_slots == 0:
                    _log.warning("no new segment in %s for %g s: %s", self._folder.path, _FULL_DISK_PAUSE_S, error)
                continue
            shelf = Shelf.of(segment, owned=True)
            shelf.free = list(range(segment.num_slots))
            with self._lock:
                self._index.add_shelf(shelf)
            if num_slots < wanted:
                self._pause_growth()
            return True
        self._pause_growth()
        return False

    def _pause_growth(self) -> None:
        self._full_until = time.monotonic() + _FULL_DISK_PAUSE_S

    def _delete(self, shelf: Shelf) -> None:
        try:
            shelf.segment.path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("cannot delete the segment %s: %s", shelf.segment.path, error)
        shelf.close_if_unused(self._lock)

    def _note_failure(self, error: OSError, num_pages: int) -> None:
        with self._lock:
            self._counts["dropped" if is_no_space(error) else "error"] += num_pages
        _log.warning("%d pages not written to %s: %s", num_pages, self._folder.path, error)
