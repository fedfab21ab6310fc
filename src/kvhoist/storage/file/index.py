"""Which page lies in which slot, in memory: what this process owns and may evict, and what it reads of others.

No I/O happens here, and every method is called under the store's one lock.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable

from kvhoist.errors import StorageError
from kvhoist.storage.file.segment import slots_that_fit
from kvhoist.storage.file.shelf import Place, Shelf
from kvhoist.storage.record import namespace_of


class SizeClass:
    """The owned segments of one slot pitch, and their pages from least to most recently used."""

    def __init__(self) -> None:
        self.shelves: list[Shelf] = []
        self.pages: OrderedDict[bytes, Place] = OrderedDict()


class Index:
    """All pages that can be read here. `capacity_bytes` bounds the files of the owned segments.

    `foreign` has the pages that are served from other processes' segments: none that an owned segment holds. Where else
    in those segments a page lies stands in `copies`: should the copy that is served go, the first of them takes over.
    Once `closed` nothing is written any more: the numbers of closed files soon are those of others.
    """

    def __init__(self, capacity_bytes: int, segment_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.closed = False
        self.pending: set[bytes] = set()
        self.foreign: dict[bytes, Place] = {}
        self.copies: dict[bytes, list[Place]] = {}
        self.foreign_shelves: dict[str, Shelf] = {}
        self.owned_bytes = 0
        self.num_evicted = 0
        self._segment_bytes = segment_bytes
        self._classes: dict[int, SizeClass] = {}
        self._uses = 0

    def find(self, identity: bytes) -> Place | None:
        """Return where a page lies; owned segments before those of others."""
        for size_class in self._classes.values():
            place = size_class.pages.get(identity)
            if place is not None:
                return place
        return self.foreign.get(identity)

    def touch(self, identity: bytes, place: Place) -> None:
        """Make an owned page the most recently used."""
        if place.shelf.owned:
            self._classes[place.shelf.segment.pitch_bytes].pages.move_to_end(identity)
            self._use(place.shelf)

    def owned_shelves(self) -> list[Shelf]:
        return [shelf for size_class in self._classes.values() for shelf in size_class.shelves]

    def owned_pages(self) -> Iterable[tuple[bytes, Place]]:
        for size_class in self._classes.values():
            yield from size_class.pages.items()

    def num_owned_pages(self) -> int:
        return sum(len(size_class.pages) for size_class in self._classes.values())

    def used_bytes(self) -> int:
        return sum(pitch * len(size_class.pages) for pitch, size_class in self._classes.items())

    def add_shelf(self, shelf: Shelf) -> None:
        """Own a segment; its pages come by `publish`, its free slots stand in `shelf.free`."""
        self._classes.setdefault(shelf.segment.pitch_bytes, SizeClass()).shelves.append(shelf)
        self.owned_bytes += shelf.segment.file_bytes
        self._use(shelf)

    def drop_shelf(self, shelf: Shelf) -> None:
        """Give an owned segment up, with all its pages."""
        size_class = self._classes[shelf.segment.pitch_bytes]
        size_class.shelves.remove(shelf)
        for identity in filter(None, shelf.identities):
            del size_class.pages[identity]
            self._serve_copy(identity)
            self.num_evicted += 1
        self.owned_bytes -= shelf.segment.file_bytes
        shelf.gone = True
        if not size_class.shelves:
            del self._classes[shelf.segment.pitch_bytes]

    def take(self, pitch_bytes: int, count: int) -> list[Place]:
        """Give out up to `count` free slots of that pitch, neighbours as far as possible."""
        places: list[Place] = []
        size_class = self._classes.get(pitch_bytes)
        for shelf in size_class.shelves if size_class and not self.closed else ():
            while shelf.free and len(places) < count:
                places.append(Place(shelf, heapq.heappop(shelf.free)))
                shelf.num_writing += 1
        return places

    def publish(self, identity: bytes, place: Place) -> None:
        """Make the page in a given-out slot visible, as the most recently used one."""
        shelf, slot = place
        shelf.identities[slot] = identity
        shelf.num_pages += 1
        self._classes[shelf.segment.pitch_bytes].pages[identity] = place
        if (theirs := self.foreign.pop(identity, None)) is not None:
            self.copies.setdefault(identity, []).insert(0, theirs)
        self._use(shelf)

    def give_back(self, place: Place, *, stale: bool) -> None:
        """Free a slot that holds no page. `stale`: its header on disk may still be a valid one."""
        shelf, slot = place
        heapq.heappush(shelf.free, slot)
        if stale:
            shelf.stale.add(slot)
        else:
            shelf.stale.discard(slot)

    def unpublish(self, identity: bytes) -> Place | None:
        """Take a page out of sight. Its slot is not free before `give_back`."""
        for size_class in self._classes.values() if not self.closed else ():
            place = size_class.pages.pop(identity, None)
            if place is not None:
                self._empty(place)
                self._serve_copy(identity)
                return place
        return None

    def evict(self, pitch_bytes: int, count: int) -> int:
        """Free the slots of the up to `count` least recently used pages of that pitch, and return how many."""
        size_class = self._classes.get(pitch_bytes)
        evicted = 0
        while size_class is not None and evicted < count and size_class.pages:
            identity, place = size_class.pages.popitem(last=False)
            self._empty(place)
            self._serve_copy(identity)
            self.give_back(place, stale=True)
            evicted += 1
        self.num_evicted += evicted
        return evicted

    def growth(self, pitch_bytes: int) -> int:
        """Return how many slots a new segment of that pitch may have; 0 where capacity leaves too little."""
        wanted = max(1, self._segment_bytes // pitch_bytes)
        possible = min(wanted, slots_that_fit(self.capacity_bytes - self.owned_bytes, pitch_bytes))
        worthwhile = pitch_bytes not in self._classes or possible * 4 >= wanted
        return possible if worthwhile else 0

    def victim(self, pitch_bytes: int) -> Shelf | None:
        """Return the segment of another pitch to give up for one of this pitch: the least recently used, where no
        segment of this pitch has been idle for longer."""
        others = [shelf for shelf in self.owned_shelves() if shelf.segment.pitch_bytes != pitch_bytes]
        idle = [shelf for shelf in others if not shelf.num_writing]
        if not idle:
            return None
        oldest = min(idle, key=lambda shelf: shelf.last_used)
        size_class = self._classes.get(pitch_bytes)
        if size_class and any(shelf.last_used <= oldest.last_used for shelf in size_class.shelves):
            return None
        return oldest

    def set_foreign(self, shelf: Shelf, slot: int, identity: bytes | None) -> None:
        """Note what a slot of a foreign segment holds now. Of several copies of a page the first is served."""
        before = shelf.identities[slot]
        if before is not None:
            self._take_away(before, shelf, slot)
        shelf.identities[slot] = identity
        if identity is None:
            return
        place = Place(shelf, slot)
        if self.find(identity) is None:
            self.foreign[identity] = place
        else:
            self.copies.setdefault(identity, []).append(place)

    def forget_served(self, identity: bytes) -> bool:
        """Take the copy of a page that is served from a foreign segment out of use, until its slot is written anew."""
        place = self.foreign.get(identity)
        if place is not None:
            self.set_foreign(*place, None)
        return place is not None

    def drop_foreign(self, shelf: Shelf) -> None:
        """Forget a foreign segment."""
        for slot in range(len(shelf.identities)):
            self.set_foreign(shelf, slot, None)
        self.foreign_shelves.pop(shelf.segment.path.name, None)
        shelf.gone = True

    def of_namespace(self, namespace: bytes) -> list[bytes]:
        """Return the identities of the owned pages of a namespace."""
        return [identity for identity, _ in self.owned_pages() if namespace_of(identity) == namespace]

    def drop_empty(self) -> list[Shelf]:
        """Give up the owned segments that hold no page, and return them."""
        empty = [shelf for shelf in self.owned_shelves() if not shelf.num_pages and not shelf.num_writing]
        for shelf in empty:
            self.drop_shelf(shelf)
        return empty

    def give_up_all(self) -> list[Shelf]:
        """Let go of all segments, and return them."""
        shelves = [*self.owned_shelves(), *self.foreign_shelves.values()]
        for shelf in shelves:
            shelf.gone = True
        return shelves

    def audit(self) -> None:
        """Recount everything. Raises StorageError that names what does not hold."""
        for pitch_bytes, size_class in self._classes.items():
            for shelf in size_class.shelves:
                held = {slot for slot, identity in enumerate(shelf.identities) if identity is not None}
                free = set(shelf.free)
                name = shelf.segment.path.name
                _demand(len(free) == len(shelf.free), f"a slot of {name} is free twice")
                _demand(not free & held, f"a slot of {name} is both free and held")
                _demand(len(free) + len(held) + shelf.num_writing == len(shelf.identities), f"a slot of {name} is lost")
                _demand(shelf.num_pages == len(held), f"the pages of {name} are miscounted")
                _demand(shelf.segment.pitch_bytes == pitch_bytes, f"{name} is in the wrong size class")
            for identity, (shelf, slot) in size_class.pages.items():
                _demand(shelf in size_class.shelves, "a page lies in a segment that was given up")
                _demand(shelf.identities[slot] == identity, "a page and its slot disagree")
        files = sum(shelf.segment.file_bytes for shelf in self.owned_shelves())
        _demand(files == self.owned_bytes, "the bytes of the owned segments are miscounted")
        for identity, place in self.foreign.items():
            _demand(self.find(identity) is place, "a page of our own is served from another's segment")
        copies = [(identity, place) for identity, places in self.copies.items() for place in places]
        for identity, (shelf, slot) in [*self.foreign.items(), *copies]:
            _demand(shelf.identities[slot] == identity, "a foreign page and its slot disagree")
        _demand(all(self.find(identity) is not None for identity, _ in copies), "a copy of a page is hidden")
        noted = sum(identity is not None for shelf in self.foreign_shelves.values() for identity in shelf.identities)
        _demand(noted == len(self.foreign) + len(copies), "a copy of a page is lost")

    def _empty(self, place: Place) -> None:
        place.shelf.identities[place.slot] = None
        place.shelf.num_pages -= 1

    def _serve_copy(self, identity: bytes) -> None:
        """The copy of a page that was served is gone: serve another one, if there is one."""
        if (places := self.copies.get(identity)) is not None:
            self.foreign[identity] = places.pop(0)
            if not places:
                del self.copies[identity]

    def _take_away(self, identity: bytes, shelf: Shelf, slot: int) -> None:
        """A slot of a foreign segment does not hold a page any more."""
        if self.foreign.get(identity) == (shelf, slot):
            del self.foreign[identity]
            self._serve_copy(identity)
        elif left := [place for place in self.copies.pop(identity, []) if place != (shelf, slot)]:
            self.copies[identity] = left

    def _use(self, shelf: Shelf) -> None:
        self._uses += 1
        shelf.last_used = self._uses


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise StorageError(f"the index of the file store is broken: {what}", remedy="This is a bug: please report it.")
