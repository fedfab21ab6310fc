"""Faults for SimEngines: copies and stores that are slow, stuck, failing or wrong."""

from __future__ import annotations

import dataclasses
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from kvhoist.copies import Copied
from kvhoist.messages import Job, JobKind
from kvhoist.mover import Mover
from kvhoist.storage.file import FileStore

FaultOf = Callable[[Job, int], Sequence[int] | None]
"""Given a job and its rank: sleeps, blocks or raises as it likes, and returns the indices of pages that are to fail."""


@contextmanager
def copy_faults(fault_of: FaultOf, *, kinds: Sequence[JobKind] = (JobKind.LOAD, JobKind.OFFLOAD)) -> Iterator[None]:
    """Run `fault_of` in the copying thread before each copy of `kinds`, and let those pages fail that it names: a
    failed load leaves its blocks as they were."""
    inner = Mover._copy

    def copy(self: Any, transfer: Any, after: Any) -> Any:
        job = transfer.job
        failed = set(fault_of(job, self.rank) or ()) if job.kind in kinds else set()
        good = [i for i in range(job.num_pages) if i not in failed]
        if not failed:
            return inner(self, transfer, after)
        num_bytes = 0
        if good:
            part = SimpleNamespace(job=_part_of(job, good), arrive=transfer.arrive)
            copied = inner(self, part, after)()
            num_bytes = copied.num_bytes
            failed |= {good[i] for i in copied.failed_pages}
        return lambda: Copied(num_bytes, tuple(sorted(failed)), "planted")

    with mock.patch.object(Mover, "_copy", copy):
        yield


def _part_of(job: Job, pages: Sequence[int]) -> Job:
    per_page = len(job.device_blocks) // job.num_pages
    return dataclasses.replace(
        job,
        keys=tuple(job.keys[i] for i in pages),
        host_pages=tuple(job.host_pages[i] for i in pages),
        device_blocks=tuple(block for i in pages for block in job.device_blocks[i * per_page : (i + 1) * per_page]),
    )


@contextmanager
def slow_copies(
    seed: int, most_s: float = 0.002, kinds: Sequence[JobKind] = (JobKind.LOAD, JobKind.OFFLOAD)
) -> Iterator[None]:
    """Delay each copy at random, so that everything else overtakes it."""
    draw = random.Random(seed)

    def delay(job: Job, rank: int) -> None:
        time.sleep(draw.random() * most_s)

    with copy_faults(delay, kinds=kinds):
        yield


class Gate:
    """A door for the threads of a data plane: closed, they wait in it; `waiting` says how many do. As a `fault_of` or
    `before` it fails and replaces nothing."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waiting = 0

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def __call__(self, *_: Any) -> None:
        self.waiting += 1
        try:
            assert self._open.wait(60), "a gate that nobody opens"
        finally:
            self.waiting -= 1


@contextmanager
def store_faults(method: str, before: Callable[..., Any]) -> Iterator[None]:
    """Call `before(*arguments)` in the I/O thread before a method of every FileStore; what it returns, unless None,
    replaces the answer."""
    inner = getattr(FileStore, method)

    def wrapped(self: Any, *args: Any) -> Any:
        answer = before(*args)
        return inner(self, *args) if answer is None else answer

    with mock.patch.object(FileStore, method, wrapped):
        yield


def corrupt_host_pages(engine: Any, pages: Sequence[int] | None = None, rank: int = 0) -> None:
    """Flip a byte in each layer's part of host pages (None: of all)."""
    arena = engine.workers[rank].connector.worker_side.arena
    for page in range(arena.num_pages) if pages is None else pages:
        view = memoryview(arena.page(page)).cast("B")
        for at in range(0, len(view), 64):
            view[at] ^= 0xFF


def corrupt_folder(folder: Path) -> int:
    """Flip a byte every 256 in what a store's segments hold; returns how many files were changed."""
    changed = 0
    for path in sorted(folder.rglob("*.seg")):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            for first, end in _extents(file.fileno()):
                for at in range(first + 128, end, 256):
                    data[at] ^= 0xFF
        changed += 1
    return changed


def _extents(file: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a sparse file that were written."""
    end = 0
    while True:
        try:
            first = os.lseek(file, end, os.SEEK_DATA)
        except OSError:  # no data beyond
            return
        end = os.lseek(file, first, os.SEEK_HOLE)
        yield first, end
