"""How pages get out of segments: neighbours in one read, the blob before its header. Never under the lock."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence

from kvhoist.storage.base import Buffer
from kvhoist.storage.file.index import Index
from kvhoist.storage.file.segment import Segment, runs_of
from kvhoist.storage.file.shelf import Place, Shelf
from kvhoist.storage.record import HEADER_BYTES, header_fault

_MAX_RUN_PAGES = 512

_log = logging.getLogger(__name__)


class Reader:
    """Reads batches of pages. `lock` guards `index` and `counts`.

    A blob is read before its header: an owner clears a header before it writes over the blob, so that a header which is
    still there vouches for the bytes that were read. The checksum in it vouches for the rest.
    """

    def __init__(self, index: Index, lock: threading.Condition, counts: Counter[str]) -> None:
        self._index = index
        self._lock = lock
        self._counts = counts

    def read(self, identities: Sequence[bytes], blobs: Sequence[Buffer]) -> tuple[list[bytes | None], list[int]]:
        """Fill the blobs; return the headers (None for a miss) and the numbers of pages that could not be read."""
        found: dict[int, bytes | None] = {}
        places = self._enter(identities, blobs)
        try:
            for shelf, numbers in _by_shelf(places):
                numbers.sort(key=lambda number: places[number].slot)
                waiting = iter(numbers)
                for run in _bounded_runs([places[number].slot for number in numbers]):
                    chosen = [next(waiting) for _ in run]
                    headers = self._read_run(shelf.segment, run[0], [blobs[number] for number in chosen])
                    found.update(zip(chosen, headers, strict=True))
        finally:
            self._leave(places)
        with self._lock:
            valid = {n: h for n, h in found.items() if self._still(identities[n], places[n], h)}
            unreadable = [number for number, header in valid.items() if header is None]
            num_read = len(valid) - len(unreadable)
            self._counts["get"] += num_read
            self._counts["missing"] += len(identities) - num_read
            self._counts["error"] += len(unreadable)
        return [valid.get(number) for number in range(len(identities))], unreadable

    def _enter(self, identities: Sequence[bytes], blobs: Sequence[Buffer]) -> dict[int, Place]:
        """Find the pages and keep their files open."""
        places = {}
        with self._lock:
            for number, identity in enumerate(identities):
                place = self._index.find(identity)
                if place is None or place.shelf.closed:
                    continue
                if len(blobs[number]) <= place.shelf.segment.pitch_bytes:
                    self._index.touch(identity, place)
                    place.shelf.num_users += 1
                    places[number] = place
        return places

    def _leave(self, places: dict[int, Place]) -> None:
        with self._lock:
            for place in places.values():
                place.shelf.num_users -= 1
        for shelf in {id(place.shelf): place.shelf for place in places.values() if place.shelf.gone}.values():
            shelf.close_if_unused(self._lock)

    def _still(self, identity: bytes, place: Place, header: bytes | None) -> bool:
        """Tell whether a place was that page's all the time. A foreign slot was where its header is still the one that
        is indexed: one of the same page that was written anew vouches for other bytes than those that were read."""
        if self._index.find(identity) is not place:
            return False
        checks = place.shelf.checks
        if checks is None or header is None or int.from_bytes(header[-8:], "little") == checks[place.slot]:
            return True
        place.shelf.generation = -1
        if any(header) and header_fault(header) is not None:
            return True
        self._index.forget_served(identity)  # so that whoever asks for it next has the segment looked at
        return False

    def _read_run(self, segment: Segment, slot: int, buffers: Sequence[Buffer]) -> list[bytes | None]:
        """Read neighbouring slots, in one go or, where that fails, one by one."""
        try:
            whole = segment.read_blobs(slot, buffers)
            headers = segment.read_headers(slot, len(buffers)) if whole else []
        except OSError as error:
            _log.warning("cannot read %d pages of %s: %s", len(buffers), segment.path, error)
            whole = False
        if whole:
            return [header if len(header) == HEADER_BYTES else None for header in headers]
        if len(buffers) == 1:
            return [None]
        return [header for i, one in enumerate(buffers) for header in self._read_run(segment, slot + i, [one])]


def _by_shelf(places: dict[int, Place]) -> list[tuple[Shelf, list[int]]]:
    groups: dict[int, tuple[Shelf, list[int]]] = {}
    for number, place in places.items():
        groups.setdefault(id(place.shelf), (place.shelf, []))[1].append(number)
    return list(groups.values())


def _bounded_runs(slots: Sequence[int]) -> list[Sequence[int]]:
    return [run[i : i + _MAX_RUN_PAGES] for run in runs_of(slots) for i in range(0, len(run), _MAX_RUN_PAGES)]
