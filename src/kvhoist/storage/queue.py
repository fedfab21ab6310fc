"""Batches cut into chunks, and the queue in which chunks wait for a thread: mostly reads first, persists bounded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum

from kvhoist.messages import StorageKey
from kvhoist.storage.base import Buffer
from kvhoist.storage.outcomes import CANCELLED, PENDING, PageOutcomes

OnPart = Callable[[PageOutcomes], object]


class Urgency(IntEnum):
    """Which chunks go first."""

    READ = 0
    DROP = 1
    PERSIST = 2


_MOST_READS_IN_A_ROW = 3
"""While a write waits. What waits to be persisted keeps its host page from everyone, reads included: it must not wait
for ever, and one chunk in four costs a read a fourth of its speed at most."""


class Batch:
    """A future, and what its chunks came to so far. `on_part` is told that, too, where one of them hangs."""

    def __init__(
        self,
        num_pages: int,
        clock: Callable[[], float],
        on_cancelled: Callable[[int], None],
        on_part: OnPart | None = None,
    ) -> None:
        self.future: Future[PageOutcomes] = Future()
        self._reasons: list[str | None] = [PENDING] * num_pages
        self._left_pages = self._told_left_pages = num_pages
        self._on_part = on_part
        self._bytes = 0
        self._clock = clock
        self._on_cancelled = on_cancelled
        self._started_at: float | None = None
        self._notified = False
        self._lock = threading.Lock()

    def start(self) -> bool:
        """Mark the batch as begun; False where its caller cancelled it first. Called before each chunk runs."""
        with self._lock:
            if self._started_at is None and self._begin():
                self._started_at = self._clock()
            return self._started_at is not None

    def finish(self, chunk: Chunk, reasons: Sequence[str | None]) -> None:
        """Take in one chunk's reasons; the last chunk completes the future."""
        good = [blob for blob, reason in zip(chunk.blobs, reasons, strict=True) if reason is None]
        with self._lock:
            self._reasons[chunk.first : chunk.first + len(reasons)] = reasons
            self._bytes += sum(map(len, good))
            self._left_pages -= len(reasons)
            if self._left_pages:
                return
            started_at = self._clock() if self._started_at is None else self._started_at
            outcomes = PageOutcomes(tuple(self._reasons), self._bytes, self._clock() - started_at)
        self.future.set_result(outcomes)

    def tell_part(self) -> None:
        """Tell what the chunks that have ended came to, if it was not told before."""
        with self._lock:
            if self._on_part is None or not 0 < self._left_pages < self._told_left_pages:
                return
            self._told_left_pages = self._left_pages
            part = PageOutcomes(tuple(self._reasons), self._bytes)
        self._on_part(part)

    def cancel(self, chunk: Chunk) -> None:
        """End a chunk that was taken off the queue before it ran."""
        self._on_cancelled(len(chunk.keys))
        with self._lock:
            if self._started_at is None and self.future.cancel():
                self._begin()
                return
        self.finish(chunk, [CANCELLED] * len(chunk.keys))

    def close_empty(self) -> None:
        """Complete the future of a batch of no pages."""
        if self._begin():
            self.future.set_result(PageOutcomes(()))

    def _begin(self) -> bool:
        """Set the future running, or tell those who wait for it (once) that it was cancelled."""
        if self._notified:
            return False
        self._notified = True
        return self.future.set_running_or_notify_cancel()


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Neighbouring pages of a batch, the first at index `first`: what one thread does in one piece."""

    batch: Batch
    kind: str
    urgency: Urgency
    first: int
    keys: Sequence[StorageKey]
    blobs: Sequence[Buffer]
    act: Callable[[Sequence[StorageKey], Sequence[Buffer]], list[str | None]]


class ChunkQueue:
    """Chunks by urgency, first in first out within one; after a few reads in a row a write that waits has its turn. At
    most `max_persists` persists run at once, and at most `max_persist_pages` pages wait to be persisted. Thread-safe;
    waiting costs no CPU."""

    def __init__(self, *, max_persist_pages: int, max_persists: int) -> None:
        self.closed = False
        self._max_persist_pages = max_persist_pages
        self._max_persists = max_persists
        self._waiting: dict[Urgency, deque[Chunk]] = {urgency: deque() for urgency in Urgency}
        self._queued_pages = dict.fromkeys(Urgency, 0)
        self._running: set[Chunk] = set()
        self._running_persists = 0
        self._reads_in_a_row = 0
        self._changed = threading.Condition()

    def put(self, chunks: Sequence[Chunk]) -> int:
        """Queue the chunks of one batch, as many leading ones as there is room for persists (none when closed), and
        return how many."""
        with self._changed:
            num_queued = 0
            for chunk in chunks:
                num_pages = self._queued_pages[chunk.urgency] + len(chunk.keys)
                full = chunk.urgency is Urgency.PERSIST and num_pages > self._max_persist_pages
                if full or self.closed:
                    break
                self._waiting[chunk.urgency].append(chunk)
                self._queued_pages[chunk.urgency] = num_pages
                num_queued += 1
            self._changed.notify(num_queued)
            return num_queued

    def take(self) -> Chunk | None:
        """Wait for the next chunk that may run and mark it running; None when closed and nothing is left."""
        while True:
            with self._changed:
                while (chunk := self._next()) is None:
                    if self.closed and not any(self._waiting.values()):
                        return None
                    self._changed.wait()
            if chunk.batch.start():
                return chunk
            self.done(chunk)
            chunk.batch.cancel(chunk)

    def done(self, chunk: Chunk) -> None:
        """A chunk that `take` gave out has ended."""
        with self._changed:
            self._running.discard(chunk)
            self._running_persists -= chunk.urgency is Urgency.PERSIST
            self._changed.notify_all()

    def cancel(self, future: Future[PageOutcomes]) -> bool:
        """Take the chunks of one batch off the queue and end them; False where none waits."""
        return self._discard(lambda chunk: chunk.batch.future is future)

    def discard_cancelled(self) -> None:
        """Forget the chunks of futures that were cancelled, and with them their buffers."""
        self._discard(lambda chunk: chunk.batch.future.cancelled())

    def gauges(self) -> tuple[int, int]:
        """Return the pages that wait and the pages that run."""
        with self._changed:
            return sum(self._queued_pages.values()), sum(len(chunk.keys) for chunk in self._running)

    def running(self) -> list[Chunk]:
        """Return the chunks that run."""
        with self._changed:
            return list(self._running)

    def close(self, *, discard: bool) -> None:
        """Take in nothing more; with `discard` end what waits."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        if discard:
            self._discard(lambda _: True)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing waits or runs; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._running and not any(self._waiting.values()), timeout=timeout_s
            )

    def _next(self) -> Chunk | None:
        writes_first = self._reads_in_a_row >= _MOST_READS_IN_A_ROW
        for urgency in (Urgency.DROP, Urgency.PERSIST, Urgency.READ) if writes_first else Urgency:
            waiting = self._waiting[urgency]
            if not waiting or (urgency is Urgency.PERSIST and self._running_persists >= self._max_persists):
                continue
            writes_wait = self._waiting[Urgency.DROP] or self._waiting[Urgency.PERSIST]
            self._reads_in_a_row = self._reads_in_a_row + 1 if urgency is Urgency.READ and writes_wait else 0
            chunk = waiting.popleft()
            self._queued_pages[urgency] -= len(chunk.keys)
            self._running.add(chunk)
            self._running_persists += urgency is Urgency.PERSIST
            return chunk
        return None

    def _discard(self, matches: Callable[[Chunk], bool]) -> bool:
        gone = self.take_waiting(matches)
        for chunk in gone:
            chunk.batch.cancel(chunk)
        return bool(gone)

    def take_waiting(self, matches: Callable[[Chunk], bool] = lambda _: True) -> list[Chunk]:
        """Take the chunks off the queue that wait, for the caller to end them."""
        with self._changed:
            gone = [chunk for waiting in self._waiting.values() for chunk in waiting if matches(chunk)]
            for urgency, waiting in self._waiting.items():
                kept = [chunk for chunk in waiting if not matches(chunk)]
                if len(kept) < len(waiting):
                    self._queued_pages[urgency] = sum(len(chunk.keys) for chunk in kept)
                    self._waiting[urgency] = deque(kept)
            self._changed.notify_all()
        return gone
