"""The storage I/O of one rank: a bounded pool that seals, verifies and moves pages off the caller's thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvhoist.errors import ClosedError, ConfigError, StorageError
from kvhoist.messages import REPLICATED, PageKey, StorageKey
from kvhoist.storage.base import Buffer, Store
from kvhoist.storage.outcomes import MISSING, NOT_STORED, QUEUE_FULL, PageOutcomes
from kvhoist.storage.queue import Batch, Chunk, ChunkQueue, Urgency
from kvhoist.storage.record import Sealer
from kvhoist.units import parse_bytes

Reason = str | None

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StorageIOStats:
    """Counters since the start, in pages; `queued_pages` and `running_pages` are gauges."""

    queued_pages: int
    running_pages: int
    persisted_pages: int = 0
    prefetched_pages: int = 0
    found_pages: int = 0
    removed_pages: int = 0
    missing_pages: int = 0
    corrupt_pages: int = 0
    not_stored_pages: int = 0
    refused_pages: int = 0
    error_pages: int = 0
    cancelled_pages: int = 0
    persisted_bytes: int = 0
    prefetched_bytes: int = 0


class StorageIO:
    """Runs batches against `store` on `num_threads` threads of its own.

    Every method that takes a batch returns at once with a future of PageOutcomes. The buffers of a batch stay the
    caller's, alive and (for `persist`) unchanged, until its future is done. A future never carries an exception of the
    store: whatever the store raises is the reason of the pages of that chunk, and the thread lives on.

    Order of work: prefetch and lookup before drop before persist, and with two threads or more one of them never
    persists, so that a read waits for reads only. Where a persist would have more than `max_queued_pages` pages wait,
    the rest of it, in chunks, fails as QUEUE_FULL; reads are never refused. `chunk_bytes` bounds what one thread does
    in one piece.
    """

    def __init__(
        self,
        store: Store,
        sealer: Sealer,
        *,
        num_threads: int = 8,
        max_queued_pages: int = 4096,
        chunk_bytes: int | str = "32MiB",
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
        self._queue = ChunkQueue(max_persist_pages=max_queued_pages, max_persists=max(1, num_threads - 1))
        self._threads = [
            threading.Thread(target=self._work, name=f"kvhoist-io-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def store(self) -> Store:
        return self._store

    def persist(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> Future[PageOutcomes]:
        """Seal and put each blob under its key. What does not fit within `max_queued_pages` fails as QUEUE_FULL."""
        return self._submit(keys, blobs, Urgency.PERSIST, self._persist)

    def prefetch(self, keys: Sequence[StorageKey], buffers: Sequence[Buffer]) -> Future[PageOutcomes]:
        """Read each page into its buffer and verify it. What fails the check is quarantined; the buffer of a page that
        is not good holds bytes of no meaning."""
        return self._submit(keys, buffers, Urgency.READ, self._prefetch)

    def lookup(self, keys: Sequence[StorageKey]) -> Future[PageOutcomes]:
        """Ask which keys the store holds: MISSING for those it does not."""
        return self._submit(keys, None, Urgency.READ, self._lookup)

    def drop(self, keys: Sequence[StorageKey]) -> Future[PageOutcomes]:
        """Remove the keys from the store; absent ones are fine."""
        return self._submit(keys, None, Urgency.DROP, self._drop)

    def note_namespace(self, namespace: bytes, fields: Mapping[str, str]) -> Future[PageOutcomes]:
        """Let the store note what a namespace stands for. The one outcome says whether it could."""

        def note(_: Sequence[StorageKey], __: Sequence[Buffer]) -> list[Reason]:
            self._store.note_namespace(namespace, fields)
            return [None]

        return self._submit([StorageKey(PageKey(namespace, 0, b""), REPLICATED)], None, Urgency.READ, note)

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
            return StorageIOStats(queued_pages=queued, running_pages=running, **self._counts)

    def close(self, *, drain: bool = True, timeout_s: float = 30.0) -> bool:
        """Stop: with `drain` finish what is queued, else cancel what has not begun; the running parts are waited for.

        Returns whether every future is done and every thread gone after `timeout_s`. What is still queued then is
        cancelled; a part that hangs in the store keeps its buffers, and its future stays open. The store is not closed.
        Idempotent. A callback of one of its futures may call it: the thread that runs it is not waited for.
        """
        deadline = self._clock() + timeout_s
        self._queue.close(discard=not drain)
        if not self._queue.wait_idle(timeout_s):
            self._queue.close(discard=True)
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - self._clock()))
        return not any(thread.is_alive() for thread in others)

    def _submit(
        self,
        keys: Sequence[StorageKey],
        blobs: Sequence[Buffer] | None,
        urgency: Urgency,
        act: Callable[..., list[Reason]],
    ) -> Future[PageOutcomes]:
        if self._queue.closed:
            raise ClosedError("this storage I/O was closed", remedy="Keep it open as long as the cache is.")
        if blobs is not None and len(blobs) != len(keys):
            raise ConfigError("a batch needs one buffer a key", got=f"{len(keys)} keys, {len(blobs)} buffers")
        flat = [memoryview(blob).cast("B") for blob in blobs] if blobs is not None else [memoryview(b"")] * len(keys)
        if urgency is Urgency.READ and any(blob.readonly for blob in flat) and blobs is not None:
            raise ConfigError("a prefetch needs buffers that can be written", got="a read-only buffer")
        batch = Batch(len(keys), self._clock, self._count_cancelled)
        chunks = [
            Chunk(batch, urgency, first, keys[first:end], flat[first:end], act) for first, end in self._split(flat)
        ]
        if not chunks:
            batch.close_empty()
        else:
            for chunk in chunks[self._queue.put(chunks) :]:
                self._count(refused_pages=len(chunk.keys))
                batch.finish(chunk, [QUEUE_FULL] * len(chunk.keys))
        return batch.future

    def _split(self, blobs: Sequence[Buffer]) -> list[tuple[int, int]]:
        """Cut a batch into neighbours of at most `chunk_bytes` (but one page at least), a part for each thread."""
        most_pages = max(1, -(-len(blobs) // self._num_threads))
        parts: list[tuple[int, int]] = []
        first = num_bytes = 0
        for i, blob in enumerate(blobs):
            if i > first and (i - first >= most_pages or num_bytes + len(blob) > self._chunk_bytes):
                parts.append((first, i))
                first, num_bytes = i, 0
            num_bytes += len(blob)
        return [*parts, (first, len(blobs))] if blobs else []

    def _work(self) -> None:
        while (chunk := self._queue.take()) is not None:
            try:
                reasons = chunk.act(chunk.keys, chunk.blobs)
                if len(reasons) != len(chunk.keys):
                    raise StorageError("the store did not answer for each page", got=f"{len(reasons)} answers")
            except BaseException as error:  # a thread that dies would hang every later batch
                reasons = [_explain(error)] * len(chunk.keys)
                self._count(error_pages=len(chunk.keys))
            self._queue.done(chunk)
            try:
                chunk.batch.finish(chunk, reasons)
            except BaseException:
                _log.exception("a callback on a storage future raised")
            del chunk  # keeps no buffer alive while it waits for work

    def _persist(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[Reason]:
        headers = [self._sealer.seal(key, blob) for key, blob in zip(keys, blobs, strict=True)]
        kept = self._store.put(keys, headers, blobs)
        num_bytes = sum(len(blob) for blob, ok in zip(blobs, kept, strict=True) if ok)
        self._count(persisted_pages=sum(kept), not_stored_pages=len(keys) - sum(kept), persisted_bytes=num_bytes)
        return [None if ok else NOT_STORED for ok in kept]

    def _prefetch(self, keys: Sequence[StorageKey], buffers: Sequence[Buffer]) -> list[Reason]:
        headers = self._store.get(keys, buffers)
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
        held = self._store.exists(keys)
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


def _explain(error: BaseException) -> str:
    text = str(error)
    return f"io error: {type(error).__name__}: {text}" if text else f"io error: {type(error).__name__}"
