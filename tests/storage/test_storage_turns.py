"""Whose turn it is at the storage I/O: reads go first, and yet no write waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhoist.messages import StorageKey
from kvhoist.storage import Buffer, MemoryStore, Sealer, StorageIO
from kvhoist.storage.queue import Batch, Chunk, ChunkQueue, Urgency

DEADLINE_S = 20
NUM_READS = 8
"""That wait or run at any time: more than there are threads."""


class BusyStore(MemoryStore):
    """A store of which something is always being read: each read asks for the next before it ends."""

    def __init__(self) -> None:
        super().__init__("64MiB")
        self.next_read: Callable[[], object] = lambda: None

    def get(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[bytes | None]:
        self.next_read()
        return super().get(keys, blobs)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_persists_go_on_while_reads_never_cease(pages: Any, num_threads: int) -> None:
    store = BusyStore()
    io = StorageIO(store, Sealer(), num_threads=num_threads, chunk_bytes=1)

    def read() -> None:
        io.prefetch(pages.keys([99]), [memoryview(bytearray(pages.page_bytes))])

    store.next_read = read
    for _ in range(NUM_READS):
        read()
    try:
        persisted = io.persist(pages.keys(range(10)), [pages.blob(i) for i in range(10)]).result(DEADLINE_S)
    finally:
        store.next_read = lambda: None  # else they never cease
    assert persisted.error is None
    assert io.close(timeout_s=DEADLINE_S)


@given(
    urgencies=st.lists(st.sampled_from(list(Urgency)), min_size=1, max_size=60),
    max_persists=st.integers(1, 3),
    num_busy=st.integers(1, 4),
)
def test_a_write_that_could_begin_waits_for_three_reads_at_most(
    urgencies: list[Urgency], max_persists: int, num_busy: int
) -> None:
    """Whatever waits, with `num_busy` threads that end their oldest chunk first."""
    queue = ChunkQueue(max_persist_pages=1000, max_persists=max_persists)
    for urgency in urgencies:
        batch = Batch(1, lambda: 0.0, lambda _: None)
        queue.put([Chunk(batch, "any", urgency, 0, [None], [memoryview(b"")], lambda *_: [None])])  # type: ignore[list-item]
    left = dict.fromkeys(Urgency, 0)
    for urgency in urgencies:
        left[urgency] += 1
    running: list[Chunk] = []
    reads_in_a_row = 0
    while sum(left.values()):
        if len(running) == num_busy:
            queue.done(running.pop(0))
        num_persists = sum(chunk.urgency is Urgency.PERSIST for chunk in running)
        may_persist = left[Urgency.PERSIST] > 0 and num_persists < max_persists
        if not (left[Urgency.READ] or left[Urgency.DROP] or may_persist):
            queue.done(running.pop(0))
            continue
        chunk = queue.take()
        assert chunk is not None
        running.append(chunk)
        left[chunk.urgency] -= 1
        if chunk.urgency is Urgency.READ and (left[Urgency.DROP] or may_persist):
            reads_in_a_row += 1
        else:
            reads_in_a_row = 0
        assert reads_in_a_row <= 3
    for chunk in running:
        queue.done(chunk)
    assert queue.gauges() == (0, 0)


def test_a_read_goes_before_writes_that_wait_for_longer() -> None:
    queue = ChunkQueue(max_persist_pages=1000, max_persists=2)
    for urgency in (Urgency.PERSIST, Urgency.PERSIST, Urgency.DROP, *[Urgency.READ] * 6):
        batch = Batch(1, lambda: 0.0, lambda _: None)
        queue.put([Chunk(batch, "any", urgency, 0, [None], [memoryview(b"")], lambda *_: [None])])  # type: ignore[list-item]
    taken = [chunk.urgency.name for chunk in iter(lambda: queue.take() if queue.gauges()[0] else None, None)]
    assert taken == ["READ", "READ", "READ", "DROP", "READ", "READ", "READ", "PERSIST", "PERSIST"]
