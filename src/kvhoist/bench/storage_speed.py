"""FileStore against fio on the same disk, in one run; and how fast an index comes back.

Caching is the same in all arms: O_DIRECT where the file system has it, files preallocated, an fdatasync of each file
inside the time of a write, the page cache dropped before a read.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvhoist.bench import fio
from kvhoist.messages import WHOLE, PageKey, StorageKey
from kvhoist.private_memory import private_memory
from kvhoist.storage.base import Buffer
from kvhoist.storage.file import FileStore
from kvhoist.storage.file.capacity import DEFAULT_CAPACITY_BYTES
from kvhoist.storage.io import StorageIO
from kvhoist.storage.record import Sealer

BATCH_PAGES = 64
TARGET_RATIO = 0.85
FIO_DEPTHS = (8, BATCH_PAGES)
"""As many blocks in flight as the I/O pool has threads, and as a batch has pages: the better one is what counts."""
TARGET_REINDEX_S = 2.0
REINDEX_PAGES = 100_000

IN_FLIGHT = 2
_PAGE_BYTES, _SMOKE_PAGE_BYTES = (1 << 20, 2 << 20, 4 << 20), (1 << 18,)
_NAMESPACE = bytes(32)
_Arm = Callable[[Path, Any, list[Any], int, int, str], tuple[float, float]]
_SMALL_BYTES = 4096


def measure(scratch: Path, num_pages: int, page_bytes: Sequence[int], smoke: bool) -> dict[str, Any]:
    """Measure in the folder `scratch`.

    Per page size (default: 1, 2 and 4 MiB): medians over rounds in GiB/s of `fio` (blocks of that size, sequential, by
    depth), `store` (FileStore alone, one batch of 64 pages after the other) and `pool` (through StorageIO, checksums
    made and verified, two batches in flight). `ratio` is that of the medians to the better fio's, `ratio_of_best` that
    of the best rounds, which a machine that others use disturbs less. The arms take turns in random order. Without fio
    there is no ratio, and `fio` says how to get it. `num_pages` pages are re-indexed.
    """
    rounds, total_bytes = (1, 64 << 20) if smoke else (7, 512 << 20)
    found = fio.version()
    with FileStore(scratch / "probe", capacity="1MiB") as store:
        direct = store.is_direct
    depths = FIO_DEPTHS if found else ()
    sizes = [
        _measure_size(scratch, size, max(BATCH_PAGES * size, total_bytes), rounds, depths, direct)
        for size in page_bytes or (_SMOKE_PAGE_BYTES if smoke else _PAGE_BYTES)
    ]
    reindex = _measure_reindex(scratch, min(num_pages, 2000) if smoke else num_pages)
    return {
        "fio": found or fio.MISSING,
        "caching": ("O_DIRECT" if direct else "page cache (no O_DIRECT here)")
        + " in all arms; fdatasync inside of write times; page cache dropped before reads",
        "sizes": sizes,
        "reindex": reindex,
        "pass": reindex["pass"] and all(size[arm].get("pass") for size in sizes for arm in ("write", "read")),
    }


def _measure_size(
    scratch: Path, page_bytes: int, total_bytes: int, rounds: int, depths: Sequence[int], direct: bool
) -> dict[str, Any]:
    # One set of buffers for all arms: memory that an arm is the first to touch would be charged to that arm.
    batch, *targets = (aligned_bytes(BATCH_PAGES * page_bytes) for _ in range(1 + IN_FLIGHT))
    num_batches = total_bytes // batch.nbytes
    rates_of = {"bytes": num_batches * batch.nbytes, "page_bytes": page_bytes}

    def run_fio(depth: int, folder: Path) -> tuple[float, float]:
        return fio.measure(folder, block_bytes=page_bytes, total_bytes=rates_of["bytes"], depth=depth, direct=direct)

    mode = "on" if direct else "off"  # as fio is told, also for pages that `auto` would decide on otherwise

    def run_store(arm: _Arm, folder: Path) -> tuple[float, float]:
        written_s, read_s = arm(folder, batch, targets, page_bytes, num_batches, mode)
        return rates_of["bytes"] / written_s, rates_of["bytes"] / read_s

    arms: dict[str, Callable[[Path], tuple[float, float]]] = {
        f"fio {depth}": partial(run_fio, depth) for depth in depths
    }
    arms |= {"store": partial(run_store, _store), "pool": partial(run_store, pool)}
    rates: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    order = random.Random(0)
    for _ in range(rounds):
        for arm in order.sample(list(arms), len(arms)):
            os.sync()  # else an arm pays for what the one before it wrote or deleted
            rates[arm].append(arms[arm](scratch / arm))
            shutil.rmtree(scratch / arm)
    figures = {name: _figures(rates, i) for i, name in enumerate(("write", "read"))}
    return {**rates_of, "rounds": rounds, **figures}


def _figures(rates: dict[str, list[tuple[float, float]]], column: int) -> dict[str, Any]:
    by_arm = {arm: [rate[column] for rate in rows] for arm, rows in rates.items()}
    medians = {arm: statistics.median(rows) for arm, rows in by_arm.items()}
    figures = {
        "gib_per_s": {arm: round(median / (1 << 30), 3) for arm, median in medians.items()},
        "best_gib_per_s": {arm: round(max(rows) / (1 << 30), 3) for arm, rows in by_arm.items()},
    }
    yardsticks = [arm for arm in by_arm if arm.startswith("fio")]
    if not yardsticks:
        return figures
    plain = max(medians[arm] for arm in yardsticks)
    best = max(max(by_arm[arm]) for arm in yardsticks)
    ratios = {arm: medians[arm] / plain for arm in ("store", "pool")}
    return {
        **figures,
        "ratio": {arm: round(ratio, 3) for arm, ratio in ratios.items()},
        "ratio_of_best": {arm: round(max(by_arm[arm]) / best, 3) for arm in ratios},
        "target_ratio": TARGET_RATIO,
        "pass": ratios["pool"] >= TARGET_RATIO,
    }


def aligned_bytes(num_bytes: int) -> Any:
    """Return random bytes that lie aligned, as host pages do."""
    array = np.frombuffer(private_memory(num_bytes), dtype=np.uint8)
    array[:] = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    return array


def _store(
    folder: Path, batch: Any, targets: list[Any], page_bytes: int, num_batches: int, direct: str
) -> tuple[float, float]:
    blobs = pages_of(batch, page_bytes)
    keys = [_keys(number, len(blobs)) for number in range(num_batches)]
    sealer = Sealer()
    headers = [[sealer.seal(key, blob) for key, blob in zip(row, blobs, strict=True)] for row in keys]
    store = _opened(folder, blobs[0], direct)
    begin = time.perf_counter()
    for row, sealed in zip(keys, headers, strict=True):
        demand(all(store.put(row, sealed, blobs)))
    _sync(folder)
    written_s = time.perf_counter() - begin
    _drop_cache(folder)
    buffers = pages_of(targets[0], page_bytes)
    begin = time.perf_counter()
    for row in keys:
        demand(None not in store.get(row, buffers))
    read_s = time.perf_counter() - begin
    store.close()
    return written_s, read_s


def pool(
    folder: Path, batch: Any, targets: list[Any], page_bytes: int, num_batches: int, direct: str
) -> tuple[float, float]:
    """Persist the pages of `batch` under new keys `num_batches` times, and prefetch them all into `targets`; return the
    seconds of each."""
    blobs = pages_of(batch, page_bytes)
    keys = [_keys(number, len(blobs)) for number in range(num_batches)]
    store = _opened(folder, blobs[0], direct)
    io = StorageIO(store, Sealer())
    buffers = [pages_of(target, page_bytes) for target in targets]
    begin = time.perf_counter()
    _pipeline(lambda number: io.persist(keys[number], blobs), num_batches)
    _sync(folder)
    written_s = time.perf_counter() - begin
    _drop_cache(folder)
    begin = time.perf_counter()
    _pipeline(lambda number: io.prefetch(keys[number], buffers[number % IN_FLIGHT]), num_batches)
    read_s = time.perf_counter() - begin
    io.close()
    store.close()
    return written_s, read_s


def _opened(folder: Path, blob: Buffer, direct: str) -> FileStore:
    """Return a new store that has its first segment, with `blob` in it: that file is allocated before the time runs, as
    fio's is. A segment is a 32nd of the capacity."""
    store = FileStore(folder, capacity=DEFAULT_CAPACITY_BYTES, direct=direct)
    key = StorageKey(PageKey(_NAMESPACE, 1, bytes(32)), WHOLE)
    demand(store.put([key], [Sealer().seal(key, blob)], [blob]) == [True])
    return store


def _pipeline(submit: Callable[[int], Any], num_batches: int) -> None:
    """Keep `IN_FLIGHT` batches under way; a batch's buffers are used again only when it is done."""
    futures: list[Any] = []
    for number in range(num_batches):
        if number >= IN_FLIGHT:
            demand(futures[number - IN_FLIGHT].result().error is None)
        futures.append(submit(number))
    for future in futures[-IN_FLIGHT:]:
        demand(future.result().error is None)


def _measure_reindex(scratch: Path, num_pages: int) -> dict[str, Any]:
    folder = scratch / "reindex"
    capacity = 2 * num_pages * (_SMALL_BYTES + 256) + (64 << 20)
    blob = memoryview(bytes(_SMALL_BYTES))
    sealer = Sealer()
    with FileStore(folder, capacity=capacity) as store:
        for first in range(0, num_pages, 1024):
            keys = _keys(first, min(1024, num_pages - first))
            demand(all(store.put(keys, [sealer.seal(key, blob) for key in keys], [blob] * len(keys))))
    _sync(folder)
    seconds = []
    for _ in range(3):
        _drop_cache(folder)
        begin = time.perf_counter()
        store = FileStore(folder, capacity=capacity)
        seconds.append(time.perf_counter() - begin)
        demand(store.stats().num_pages == num_pages)
        num_segments = store.num_segments()[0]
        store.close()
    median_s = statistics.median(seconds)
    return {
        "num_pages": num_pages,
        "num_segments": num_segments,
        "seconds": round(median_s, 3),
        "target_seconds": TARGET_REINDEX_S,
        "pass": median_s <= TARGET_REINDEX_S,
    }


def pages_of(batch: Any, page_bytes: int) -> list[Buffer]:
    """Return the pages of `batch`, an array of bytes."""
    view = memoryview(batch)
    return [view[i : i + page_bytes] for i in range(0, len(view), page_bytes)]


def _keys(number: int, count: int) -> list[StorageKey]:
    return [
        StorageKey(PageKey(_NAMESPACE, 0, number.to_bytes(16, "little") + i.to_bytes(16, "little")), WHOLE)
        for i in range(count)
    ]


def _sync(folder: Path) -> None:
    _each_file(folder, os.fdatasync)


def _drop_cache(folder: Path) -> None:
    _each_file(folder, lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))


def _each_file(folder: Path, act: Callable[[int], None]) -> None:
    for path in (folder / "segments").iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            act(fd)
        finally:
            os.close(fd)


def demand(holds: bool) -> None:
    """Raise RuntimeError unless a store did what a benchmark counts on."""
    if not holds:
        raise RuntimeError("the store did not keep what the benchmark gave it: is it full?")
