"""The segments in the folder: which are ours, which are others', and what changed in those.

A segment belongs to the process that holds its lock. At start the segments whose owner is gone are adopted, newest
first, as far as they fit into capacity; the rest is read only, and never written.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvhoist.storage.file.direct import Direct
from kvhoist.storage.file.duplicates import Found, without_duplicates
from kvhoist.storage.file.folder import Folder, delete_orphan
from kvhoist.storage.file.index import Index
from kvhoist.storage.file.scan import last_words, scan_slots, used_slots
from kvhoist.storage.file.segment import SUFFIX, UNFINISHED_SUFFIX, Segment, SegmentFault
from kvhoist.storage.file.shelf import Place, Shelf

_ORPHAN_CHECK_S = 10.0
_ORPHAN_KEEP_S = 7 * 86400.0

_log = logging.getLogger(__name__)


class Neighbours:
    """Keeps `index` in step with the folder. `lock` guards `index` and `counts`; files are read without it.
    `grow_lock` is held by whoever makes or deletes owned segments.

    An orphan that did not fit at start is left for the processes that start beside this one (ranks of one engine start
    together). Where none took it within `orphan_grace_s`, it is adopted if there is room. It is deleted only where
    nobody wrote to it for a week or the disk is full: a process of small capacity must not end the cache of a larger
    one that is being restarted.
    With `syncs` an adopted segment is made durable: its pages are confirmed without a write.
    """

    def __init__(
        self,
        folder: Folder,
        index: Index,
        lock: threading.Condition,
        grow_lock: threading.Lock,
        counts: Counter[str],
        direct: Direct,
        *,
        syncs: bool,
        read_only: bool,
        refresh_s: float,
        orphan_grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.faults: dict[str, str] = {}
        self._folder = folder
        self._index = index
        self._lock = lock
        self._grow_lock = grow_lock
        self._counts = counts
        self._direct = direct
        self._syncs = syncs
        self._read_only = read_only
        self._refresh_s = refresh_s
        self._orphan_grace_s = orphan_grace_s
        self._clock = clock
        self._next_refresh = 0.0
        self._next_orphan_check = clock() + _ORPHAN_CHECK_S
        self._busy = threading.Lock()

    def start(self) -> None:
        """Adopt what has no owner, index everything. Raises OSError where the folder cannot be listed."""
        if not self._read_only:
            for path in self._paths(UNFINISHED_SUFFIX):
                delete_orphan(path)
        segments = [segment for path in self._paths(SUFFIX) if (segment := self._open(path)) is not None]
        segments.sort(key=lambda segment: os.fstat(segment.fd).st_mtime_ns, reverse=True)
        with self._busy:
            mine = [segment for segment in segments if not self._read_only and self._claim(segment)]
            self._adopt(mine)
            for segment in segments:
                if segment not in mine:
                    self._add_foreign(segment)
        self._next_refresh = self._clock() + self._refresh_s

    def refresh(self) -> None:
        """See what other processes stored since the last time; at most every `refresh_s`, by one thread at a time."""
        if self._clock() < self._next_refresh or not self._busy.acquire(blocking=False):
            return
        try:
            if self._index.closed:
                return
            checks_orphans = not self._read_only and self._clock() >= self._next_orphan_check
            if checks_orphans:
                self._next_orphan_check = self._clock() + _ORPHAN_CHECK_S
                self._give_up_unlinked()
            self._find_new()
            for shelf in list(self._index.foreign_shelves.values()):
                try:
                    self._look_at(shelf, checks_orphans=checks_orphans)
                except (OSError, SegmentFault) as error:
                    self._forget(shelf)
                    self._note_fault(shelf.segment.path, error)
        except OSError as error:
            _log.warning("cannot see what other processes stored in %s: %s", self._folder.path, error)
        finally:
            self._next_refresh = self._clock() + self._refresh_s
            self._busy.release()

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until a look that is under way is over; once `index` is closed, no other begins."""
        if self._busy.acquire(timeout=timeout_s):
            self._busy.release()

    def _look_at(self, shelf: Shelf, *, checks_orphans: bool) -> None:
        if shelf.segment.is_unlinked():
            self._forget(shelf)
            return
        if shelf.segment.generation() != shelf.generation:
            self._rescan(shelf)
        if checks_orphans:
            self._check_orphan(shelf)

    def _give_up_unlinked(self) -> None:
        """Give up owned segments that somebody deleted: what lies in them ends with this process."""
        with self._grow_lock, self._lock:
            gone = [one for one in self._index.owned_shelves() if not one.num_writing and one.segment.is_unlinked()]
            for shelf in gone:
                self._index.drop_shelf(shelf)
        for shelf in gone:
            shelf.close_if_unused(self._lock)
            _log.warning("the segment %s of this process was deleted", shelf.segment.path)

    def _note_fault(self, path: Path, error: OSError | SegmentFault) -> None:
        self.faults[path.name] = (error.strerror if isinstance(error, OSError) else None) or str(error)
        _log.warning("left the segment %s alone: %s", path, self.faults[path.name])

    def _count_quarantined(self, count: int) -> None:
        with self._lock:
            self._counts["quarantined"] += count

    def _paths(self, suffix: str) -> list[Path]:
        if self._read_only and not self._folder.segments.exists():
            return []
        return self._folder.segment_files(suffix)

    def _find_new(self) -> None:
        with self._grow_lock:  # else a segment that the writer just made would look like another's
            paths = self._paths(SUFFIX)
            with self._lock:
                known = {shelf.segment.path.name for shelf in self._index.owned_shelves()}
                known.update(self._index.foreign_shelves, self.faults)
        for path in paths:
            segment = self._open(path) if path.name not in known else None
            if segment is not None:
                self._add_foreign(segment)

    def _open(self, path: Path) -> Segment | None:
        try:
            return Segment.open(path, self._folder.store_id, self._direct, writable=not self._read_only)
        except FileNotFoundError:
            return None
        except SegmentFault as fault:
            self._count_quarantined(1)
            if fault.damaged and not self._read_only and delete_orphan(path):
                _log.warning("deleted the segment %s: %s", path, fault)
                return None
            self._note_fault(path, fault)
        except OSError as error:
            self._note_fault(path, error)
        return None

    def _claim(self, segment: Segment) -> bool:
        """Become the owner of a segment that has none, if it fits."""
        with self._lock:
            if self._index.owned_bytes + segment.file_bytes > self._index.capacity_bytes or not segment.try_lock():
                return False
            self._index.owned_bytes += segment.file_bytes
            return True

    def _adopt(self, segments: list[Segment]) -> None:
        """Own claimed segments: index their pages in the order in which they were written, clear what is damaged."""
        pages, shelves = list[Found](), list[tuple[int, Shelf]]()
        for segment in segments:
            try:
                shelf, found = self._read_owned(segment)
            except OSError as error:  # a bad sector in one table is no reason to serve nothing of the others
                with self._lock:
                    self._index.owned_bytes -= segment.file_bytes
                segment.close()
                self._note_fault(segment.path, error)
                continue
            shelves.append((max((when for when, _, _ in found), default=0), shelf))
            pages += [(when, identity, Place(shelf, slot)) for when, slot, identity in found]
        pages, copies = without_duplicates(pages)
        with self._lock:
            for _, shelf in sorted(shelves, key=lambda pair: pair[0]):
                self._index.owned_bytes -= shelf.segment.file_bytes
                self._index.add_shelf(shelf)
            for _, identity, place in pages:
                self._publish_first(identity, place)
            for place in copies:
                self._index.give_back(place, stale=True)

    def _publish_first(self, identity: bytes, place: Place) -> None:
        held = (before := self._index.find(identity)) is not None and before.shelf.owned
        self._index.give_back(place, stale=True) if held else self._index.publish(identity, place)

    def _read_owned(self, segment: Segment) -> tuple[Shelf, list[tuple[int, int, bytes]]]:
        table = segment.read_table()
        segment.keep_table(table)
        used = used_slots(table)
        scan = scan_slots(table, used, pitch_bytes=segment.pitch_bytes, slots_in_file=segment.slots_in_file())
        shelf = Shelf.of(segment, owned=True)
        shelf.free = list(set(range(segment.num_slots)).difference(used) | set(scan.damaged))
        heapq.heapify(shelf.free)
        self._count_quarantined(len(scan.damaged))
        try:
            segment.clear_headers(scan.damaged)
            segment.restore_length()
            if self._syncs:
                segment.sync()
        except OSError as error:
            _log.warning("cannot repair the segment %s: %s", segment.path, error)
            shelf.stale.update(scan.damaged)
        return shelf, scan.found

    def _add_foreign(self, segment: Segment) -> None:
        shelf = Shelf.of(segment, owned=False)
        shelf.checks = np.zeros(segment.num_slots, dtype=np.uint64)
        with self._lock:
            self._index.foreign_shelves[segment.path.name] = shelf
        try:
            self._rescan(shelf)
        except OSError as error:
            self._forget(shelf)
            self._note_fault(segment.path, error)

    def _rescan(self, shelf: Shelf) -> None:
        """Take in the headers that changed since the last time."""
        segment = shelf.segment
        generation = segment.generation()
        table = segment.read_table()
        changed: list[int] = np.flatnonzero((checks := last_words(table)) != shelf.checks).tolist()
        scan = scan_slots(table, changed, pitch_bytes=segment.pitch_bytes, slots_in_file=segment.slots_in_file())
        with self._lock:
            self._counts["quarantined"] += sum(bool(checks[slot]) for slot in scan.damaged)
            for slot in set(changed).difference(slot for _, slot, _ in scan.found):
                self._index.set_foreign(shelf, slot, None)
            for _, slot, identity in scan.found:
                self._index.set_foreign(shelf, slot, identity)
            shelf.checks = checks
            shelf.generation = generation

    def _forget(self, shelf: Shelf) -> None:
        with self._lock:
            self._index.drop_foreign(shelf)
        shelf.close_if_unused(self._lock)

    def _check_orphan(self, shelf: Shelf) -> None:
        """Adopt a segment that had no owner for `orphan_grace_s`, or delete it where its time is over."""
        segment = shelf.segment
        if not segment.try_lock():
            shelf.orphan_since = None
            return
        if shelf.orphan_since is None:
            shelf.orphan_since = self._clock()
            self._rescan(shelf)  # its owner may have died between its last headers and their generation
        if self._clock() - shelf.orphan_since < self._orphan_grace_s:
            segment.unlock()
            return
        mine = Segment.open(segment.path, self._folder.store_id, self._direct, writable=True)
        segment.unlock()
        if self._claim(mine):
            self._forget(shelf)
            self._adopt([mine])
            return
        try:
            if mine.is_abandoned(_ORPHAN_KEEP_S) and mine.try_lock():
                mine.path.unlink(missing_ok=True)
                self._forget(shelf)
        finally:
            mine.close()
