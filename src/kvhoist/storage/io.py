"""The storage I/O of one rank: a bounded pool that seals, verifies and moves pages off the caller's thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

from kvhoist.affinity import start
from kvhoist.errors import ClosedError, ConfigError
from kvhoist.messages import REPLICATED, PageKey, StorageKey
from kvhoist.storage.base import Buffer, Store
from kvhoist.storage.breaker import HANG_S, Breaker
from kvhoist.storage.outcomes import (
    MISSING,
    NOT_STORED,
    QUEUE_FULL,
    PageOutcomes,
    StorageIOStats,
    of_each,
    reason_of,
)
from kvhoist.storage.queue import Batch, Chunk, ChunkQueue, OnPart, Urgency
from kvhoist.storage.record import Sealer
from kvhoist.units import parse_bytes

Reason = str | None

_log = logging.getLogger(__name__)


class StorageIO:
    """Runs batches against `store` on `num_threads` threads of its own.

    Every method that takes a batch returns at once with a future of PageOutcomes. The buffers of a batch stay the
    caller's, alive and (for `persist`) unchanged, until its future is done. A future never carries an exception of the
    store: whatever the store raises is the reason of the pages of that chunk, and the thread lives on. A store that
    fails as a whole again and again, or has not answered a call for `hang_s`, is fenced off: batches fail at once,
    what waits fails too, and only what hangs stays in use. The store is tried again by itself.

    `on_part`, of a persist or prefetch, is told what the other parts of its batch came to while one hangs: their
    buffers are the caller's again. It is called in a thread of the pool, maybe once after the future is done.

    Order of work: prefetch and lookup before drop before persist, but of four chunks that begin one is a write, if one
    waits: reads never starve persists. With two threads or more one of them never persists. Where a persist would have
    more than `max_queued_pages` pages wait, the rest of it, in chunks, fails as QUEUE_FULL; reads are never refused.
    `chunk_bytes` bounds what one thread does in one piece.
    """

    def __init__(
        self,
        store: Store,
        sealer: Sealer,
        *,
        num_threads: int = 8,
        max_queued_pages: int = 4096,
        chunk_bytes: int | str = "32MiB",
        hang_s: float = HANG_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value, most in (("num_threads", num_threads, 256), ("max_queued_pages", max_queued_pages, 1 << 30)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
                raise ConfigError(f"{name} cannot work", got=repr(value), expected=f"an int from 1 to {most}")
        self._store = store
        self._sealer = sealer
        self._num_threads = num_threads
        self._chunk_bytes = parse_bytes(chunk_bytes, name="chunk_bytes")
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._max_persists = max(1, num_threads - 1)
        self._queue = ChunkQueue(max_persist_pages=max_queued_pages, max_persists=self._max_persists)
        self._breaker = Breaker(store.name, hang_s=hang_s, clock=clock)
        self._threads = [
            threading.Thread(target=self._work, name=f"kvhoist-io-{i}", daemon=True) for i in range(num_threads)
        ]
        self._threads.append(threading.Thread(target=self._watch, name="kvhoist-io-watch", daemon=True))
        start(*self._threads)

    @property
    def store(self) -> Store:
        return self._store

    def persist(
        self, keys: Sequence[StorageKey], blobs: Sequence[Buffer], *, on_part: OnPart | None = None
    ) -> Future[PageOutcomes]:
        """Seal and put each blob under its key. What does not fit within `max_queued_pages` fails as QUEUE_FULL."""
        return self._submit("persist", keys, blobs, Urgency.PERSIST, self._persist, on_part)

    def prefetch(
        self, keys: Sequence[StorageKey], buffers: Sequence[Buffer], *, on_part: OnPart | None = None
    ) -> Future[PageOutcomes]:
        """Read each page into its buffer and verify it. What fails the check is quarantined; the buffer of a page that
        is not good holds bytes of no meaning."""
        return self._submit("prefetch", keys, buffers, Urgency.READ, self._prefetch, on_part)

    def lookup(self, keys: Sequence[StorageKey]) -> Future[PageOutcomes]:
        """Ask which keys the store holds: MISSING for those it does not."""
        return self._submit("lookup", keys, None, Urgency.READ, self._lookup)

    def drop(self, keys: Sequence[StorageKey]) -> Future[PageOutcomes]:
        """Remove the keys from the store; absent ones are fine."""
        return self._submit("drop", keys, None, Urgency.DROP, self._drop)

    def note_namespace(self, namespace: bytes, fields: Mapping[str, str]) -> Future[PageOutcomes]:
        """Let the store note what a namespace stands for. The one outcome says whether it could."""

        def note(_: Sequence[StorageKey], __: Sequence[Buffer]) -> list[Reason]:
            self._store.note_namespace(namespace, fields)
            return [None]

        key = StorageKey(PageKey(namespace, 0, b""), REPLICATED)
        return self._submit("note", [key], None, Urgency.READ, note)

    def cancel(self, future: Future[PageOutcomes]) -> bool:
        """Cancel the parts of a batch that have not begun, and return whether there were any. A batch of which nothing
        began becomes a cancelled future; of one that began, the rest ends as CANCELLED and the future is done when the
        running parts are."""
        if future.done():
            return False
        if future.cancel():
            self._queue.discard_cancelled()
            return True
        return self._queue.cancel(future)

    def stats(self) -> StorageIOStats:
        queued, running = self._queue.gauges()
        with self._counts_lock:
            counts = {**self._counts, "num_fences": self._breaker.num_fences}
        return StorageIOStats(queued, running, fenced=self._breaker.fenced, **counts)

    def close(self, *, drain: bool = True, timeout_s: float = 30.0) -> bool:
        """Stop: with `drain` finish what is queued, else cancel what has not begun; the running parts are waited for.

        Returns whether every future is done and every thread gone after `timeout_s`. What is still queued then is
        cancelled; a part that hangs in the store keeps its buffers, and its future stays open, but the others are told
        (`on_part`). The store is not closed.
        Idempotent. A callback of one of its futures may call it: the thread that runs it is not waited for.
        """
        deadline = self._clock() + timeout_s
        self._queue.close(discard=not drain)
        if not self._queue.wait_idle(timeout_s):
            self._queue.close(discard=True)
        self._breaker.close()
        self._tell_parts()
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - self._clock()))
        return not any(thread.is_alive() for thread in others)

    def _submit(
        self,
        kind: str,
        keys: Sequence[StorageKey],
        blobs: Sequence[Buffer] | None,
        urgency: Urgency,
        act: Callable[..., list[Reason]],
        on_part: OnPart | None = None,
    ) -> Future[PageOutcomes]:
        if self._queue.closed:
            raise ClosedError("this storage I/O was closed", remedy="Keep it open as long as the cache is.")
        if blobs is not None and len(blobs) != len(keys):
            raise ConfigError("a batch needs one buffer a key", got=f"{len(keys)} keys, {len(blobs)} buffers")
        flat = [memoryview(blob).cast("B") for blob in blobs] if blobs is not None else [memoryview(b"")] * len(keys)
        # What moves no bytes is one call: to wake every thread for it takes longer, and the GIL from whoever asks.
        num_threads = self._max_persists if urgency is Urgency.PERSIST else self._num_threads
        parts = self._split(flat, num_threads) if blobs is not None or not keys else [(0, len(keys))]
        if urgency is Urgency.READ and any(blob.readonly for blob in flat) and blobs is not None:
            raise ConfigError("a prefetch needs buffers that can be written", got="a read-only buffer")
        batch = Batch(len(keys), self._clock, self._count_cancelled, on_part)
        chunks = [Chunk(batch, kind, urgency, first, keys[first:end], flat[first:end], act) for first, end in parts]
        if not chunks:
            batch.close_empty()
        elif (refusal := self._breaker.refusal(kind)) is not None:
            for chunk in chunks:
                self._fail(chunk, refusal)
        else:
            for chunk in chunks[self._queue.put(chunks) :]:
                self._count(refused_pages=len(chunk.keys))
                batch.finish(chunk, [QUEUE_FULL] * len(chunk.keys))
            if (hang := self._breaker.hang()) is not None:  # since it was asked: all threads may be in the store
                self._fail_waiting(hang, lambda chunk: chunk.batch is batch)
        return batch.future

    def _split(self, blobs: Sequence[Buffer], num_threads: int) -> Iterator[tuple[int, int]]:
        """Cut a batch into even parts of at most `chunk_bytes` (but one page at least): one or more for each of so many
        threads, so that all end together."""
        if not blobs:
            return iter(())
        num_pages = len(blobs)
        most_pages = max(1, self._chunk_bytes // max(1, *map(len, blobs)))
        rounds = -(-num_pages // (num_threads * most_pages))
        num_parts = min(num_pages, num_threads * rounds)
        return pairwise(i * num_pages // num_parts for i in range(num_parts + 1))

    def _work(self) -> None:
        while (chunk := self._queue.take()) is not None:
            reasons = self._act(chunk)
            self._queue.done(chunk)
            _end(chunk.batch.finish, chunk, reasons)
            if self._breaker.hang() is not None:
                _end(chunk.batch.tell_part)
            del chunk  # keeps no buffer alive while it waits for work

    def _act(self, chunk: Chunk) -> list[Reason]:
        call = self._breaker.begin(chunk.kind)
        if isinstance(call, str):
            self._count(fenced_pages=len(chunk.keys))
            return [call] * len(chunk.keys)
        fault = None
        try:
            reasons = chunk.act(chunk.keys, chunk.blobs)
        except BaseException as error:  # a thread that dies would hang every later batch
            fault = reason_of(error)
            reasons = [fault] * len(chunk.keys)
            self._count(error_pages=len(chunk.keys))
        self._breaker.end(call, fault)
        return reasons

    def _watch(self) -> None:
        while (why := self._breaker.wait_for_hang()) is not None:
            self._fail_waiting(why, lambda _: True)
            self._tell_parts()

    def _tell_parts(self) -> None:
        for chunk in self._queue.running():
            _end(chunk.batch.tell_part)

    def _fail_waiting(self, reason: str, matches: Callable[[Chunk], bool]) -> None:
        for chunk in self._queue.take_waiting(matches):
            _end(self._fail, chunk, reason)

    def _fail(self, chunk: Chunk, reason: str) -> None:
        """End a chunk that does not run."""
        if chunk.batch.start():
            self._count(fenced_pages=len(chunk.keys))
            chunk.batch.finish(chunk, [reason] * len(chunk.keys))
        else:
            chunk.batch.cancel(chunk)

    def _persist(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[Reason]:
        headers = [self._sealer.seal(key, blob) for key, blob in zip(keys, blobs, strict=True)]
        kept = of_each(keys, self._store.put(keys, headers, blobs))
        num_bytes = sum(len(blob) for blob, ok in zip(blobs, kept, strict=True) if ok)
        self._count(persisted_pages=sum(kept), not_stored_pages=len(keys) - sum(kept), persisted_bytes=num_bytes)
        return [None if ok else NOT_STORED for ok in kept]

    def _prefetch(self, keys: Sequence[StorageKey], buffers: Sequence[Buffer]) -> list[Reason]:
        headers = of_each(keys, self._store.get(keys, buffers))
        reasons: list[Reason] = [MISSING] * len(keys)
        corrupt = []
        num_bytes = 0
        for i, header in enumerate(headers):
            if header is None:
                continue
            fault = self._sealer.check(keys[i], header, buffers[i])
            reasons[i] = None if fault is None else f"corrupt: {fault}"
            if fault is None:
                num_bytes += len(buffers[i])
            else:
                corrupt.append(keys[i])
        num_missing = sum(header is None for header in headers)
        good = len(keys) - len(corrupt) - num_missing
        self._count(
            prefetched_pages=good, missing_pages=num_missing, corrupt_pages=len(corrupt), prefetched_bytes=num_bytes
        )
        if corrupt:
            self._store.quarantine(corrupt)
        return reasons

    def _lookup(self, keys: Sequence[StorageKey], _: Sequence[Buffer]) -> list[Reason]:
        held = of_each(keys, self._store.exists(keys))
        self._count(found_pages=sum(held))
        return [None if ok else MISSING for ok in held]

    def _drop(self, keys: Sequence[StorageKey], _: Sequence[Buffer]) -> list[Reason]:
        self._count(removed_pages=self._store.remove(keys))
        return [None] * len(keys)

    def _count(self, **pages: int) -> None:
        with self._counts_lock:
            self._counts.update(pages)

    def _count_cancelled(self, num_pages: int) -> None:
        self._count(cancelled_pages=num_pages)


def _end(end: Callable[..., None], *arguments: Any) -> None:
    """End a chunk. What a callback raises must neither end the thread nor keep other chunks from their end."""
    try:
        end(*arguments)
    except BaseException:
        _log.exception("a callback on a storage future raised")
