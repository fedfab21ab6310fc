"""The staging ring: whoever takes bytes waits for all who had any of them before, whichever stream they work in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvhoist.copy.ring import CHUNKS, StagingRing
from kvhoist.platform.base import MemoryRegion

RING_BYTES = 64
BASE = 1000


class Event:
    """The piece of work after which it was recorded last."""

    def __init__(self) -> None:
        self.work: int | None = None


class Stream:
    """Knows what it has waited for: all that had happened before the events, and its own work."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.at: dict[int, set[int]] = {}

    def wait(self, event: Event) -> None:
        if event.work is not None:
            self.known |= KNOWN_AT[event.work]

    def record(self, event: Event) -> None:
        event.work = NOW[-1]
        KNOWN_AT[NOW[-1]] = self.known | {NOW[-1]}


KNOWN_AT: dict[int, set[int]] = {}
NOW: list[int] = []


class Platform:
    @staticmethod
    def make_event() -> Event:
        return Event()


@given(st.lists(st.tuples(st.integers(1, RING_BYTES // CHUNKS), st.integers(0, 1)), max_size=60))
def test_every_earlier_user_of_a_byte_is_waited_for(turns: list[tuple[int, int]]) -> None:
    KNOWN_AT.clear()
    NOW.clear()
    ring = StagingRing(MemoryRegion(BASE, RING_BYTES), Platform())  # type: ignore[arg-type]
    streams = [Stream(), Stream()]
    last_user: dict[int, int] = {}
    for work, (num_bytes, which) in enumerate(turns):
        NOW.append(work)
        stream = streams[which]
        with ring:
            chunk = ring.take(num_bytes, stream)  # type: ignore[arg-type]
            taken = range(chunk.address, chunk.address + num_bytes)
            assert taken.start >= BASE
            assert taken.stop <= BASE + RING_BYTES
            assert {last_user[byte] for byte in taken if byte in last_user} <= stream.known
            ring.give_back(chunk, stream)  # type: ignore[arg-type]
            stream.known.add(work)
        last_user.update(dict.fromkeys(taken, work))
        assert len(ring._in_use) <= RING_BYTES
