"""Several processes on one folder, and processes that are killed in the middle of writing.

A moment is a random time after the start of a writer or, every other time, after the first page that it confirmed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forks import status_in_fork

from kvhoist.errors import ClosedError

DEADLINE_S = 30

ZYGOTE = """
import os, sys
from kvhoist.storage import FileStore
from kvhoist.testing import Pages

def write_for_ever(folder, capacity, fsync, first, batch):
    pages = Pages()
    store = FileStore(folder, capacity=capacity, fsync=fsync, refresh_s=0.0)
    while True:
        ids = range(first, first + batch)
        kept = pages.put(store, ids)
        os.write(1, ("".join(f"kept {i}\\n" for i, ok in zip(ids, kept) if ok)).encode())
        first += batch

for line in sys.stdin:
    folder, capacity, fsync, first, batch = line.split()
    pid = os.fork()
    if pid == 0:
        write_for_ever(folder, capacity, fsync, int(first), int(batch))
    os.write(1, f"pid {pid}\\n".encode())
    os.waitpid(pid, 0)
    os.write(1, b"dead\\n")
"""


class Zygote:
    """A process that has imported everything and forks writers, so that a writer starts in milliseconds."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", ZYGOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def start(self, folder: Path, *, capacity: str, first: int, batch: int, fsync: str = "never") -> int:
        """Start a writer of pages `first`, `first + 1`, … and return its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder} {capacity} {fsync} {first} {batch}\n".encode())
        self._process.stdin.flush()
        self._early: list[int] = []
        while not (line := self._line()).startswith("pid"):
            self._early.append(int(line.split()[1]))
        return int(line.split()[1])

    def await_first(self) -> None:
        """Wait until the writer has confirmed something."""
        if not self._early:
            self._early.append(int(self._line().split()[1]))

    def kill(self, pid: int) -> list[int]:
        """Kill the writer and return the pages whose storing it had confirmed."""
        os.kill(pid, signal.SIGKILL)
        kept = self._early
        while (line := self._line()) != "dead":
            kept.append(int(line.split()[1]))
        return kept

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        assert line, "the zygote died"
        return line


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    process = Zygote()
    yield process
    process.close()


def test_a_forked_child_is_refused_and_its_close_changes_nothing(stores: Any, pages: Any) -> None:
    """It would write where its parent writes, and holds the same locks."""
    store = stores.open()
    assert all(pages.put(store, range(4)))

    def be_refused() -> int:
        num_refused = 0
        for act in (lambda: pages.put(store, [7]), lambda: pages.read(store, [1]), lambda: store.remove([])):
            try:
                act()
            except ClosedError as error:
                num_refused += "forked from" in str(error)
        store.close()
        return num_refused

    assert status_in_fork(be_refused) == 3
    assert all(pages.put(store, range(4, 8)))
    other = stores.open()
    assert other.num_segments() == (0, 1), "the segment still is its owner's"
    assert pages.read(other, range(8)) == pages.read(store, range(8)) == ["good"] * 8
    store.audit()


def test_killed_at_100_random_moments_no_confirmed_page_is_lost(stores: Any, pages: Any, zygote: Zygote) -> None:
    rng = random.Random(1)
    confirmed: set[int] = set()
    first = 0
    for moment in range(100):
        pid = zygote.start(stores.folder, capacity="256MiB", first=first, batch=rng.randrange(1, 6))
        if moment % 2:
            zygote.await_first()
        time.sleep(rng.uniform(0, 0.02))
        confirmed.update(zygote.kill(pid))
        store = stores.open(capacity="256MiB")
        assert all(store.exists(pages.keys(sorted(confirmed)))), f"after moment {moment}"
        looked_at = sorted(confirmed)[-100:] + rng.sample(sorted(confirmed), min(50, len(confirmed)))
        assert set(pages.read(store, looked_at)) <= {"good"}, f"after moment {moment}"
        assert store.stats().quarantined_pages == 0
        assert store.num_segments()[1] == 0, "the dead leave no lock"
        first = max(confirmed, default=0) + 10
        unconfirmed = range(max(confirmed, default=0) + 1, first)
        assert set(pages.read(store, unconfirmed)) <= {"good", "missing"}
        assert pages.put(store, [10**6 + moment]) == [True]
        store.audit()
        store.close()
    assert set(pages.read(stores.open(capacity="256MiB"), sorted(confirmed))) == {"good"}


@pytest.mark.parametrize(("fsync", "longest_s"), [("never", 0.02), ("batch", 0.2)])
def test_killed_at_50_random_moments_while_evicting_every_page_served_is_right(
    stores: Any, pages: Any, zygote: Zygote, fsync: str, longest_s: float
) -> None:
    rng = random.Random(2)
    first = 0
    for moment in range(50):
        pid = zygote.start(stores.folder, capacity="200KiB", first=first, batch=7, fsync=fsync)
        if moment % 2:
            zygote.await_first()
        time.sleep(rng.uniform(0, longest_s))
        kept = zygote.kill(pid)
        store = stores.open(capacity="200KiB")
        near = range(max(0, first - 100), first + len(kept) + 20)
        outcomes = pages.read(store, near)
        assert set(outcomes) <= {"good", "missing"}, f"after moment {moment}"
        assert len(kept) < 7 or "good" in outcomes
        assert store.stats().quarantined_pages == 0
        assert pages.put(store, [10**6 + moment]) == [True]
        assert pages.read(store, [10**6 + moment]) == ["good"]
        assert sum(path.stat().st_size for path in stores.segments()) <= 200 << 10
        store.audit()
        store.close()
        first += len(kept) + 20


def test_a_process_sees_what_another_stores_and_outlives_its_death(stores: Any, pages: Any, zygote: Zygote) -> None:
    ours = stores.open(capacity="64MiB", orphan_grace_s=0.0)
    pages.put(ours, range(10**6, 10**6 + 20))
    pid = zygote.start(stores.folder, capacity="64MiB", first=0, batch=3)
    deadline = time.monotonic() + DEADLINE_S
    seen = 0
    while seen < 30:
        assert time.monotonic() < deadline, f"saw {seen} of the other process's pages"
        pages.put(ours, [10**6 + 100 + seen])
        outcomes = pages.read(ours, range(seen, seen + 3))
        assert set(outcomes) <= {"good", "missing"}
        seen += outcomes.count("good")
    assert ours.num_segments()[1] > 0
    kept = zygote.kill(pid)
    assert pages.read(ours, kept) == ["good"] * len(kept)
    assert pages.read(ours, range(10**6, 10**6 + 20)) == ["good"] * 20
    ours._neighbours._next_orphan_check = 0.0
    assert ours.exists([pages.key(-1)]) == [False]
    assert ours.num_segments()[1] == 0, "the dead process's segments were adopted"
    assert pages.read(ours, kept) == ["good"] * len(kept)
    assert ours.remove(pages.keys(kept)) == len(kept)


def test_what_a_process_wrote_and_died_before_it_told_of_it_is_seen(stores: Any, pages: Any, monkeypatch: Any) -> None:
    """Where the segment is not adopted, since it does not fit or the grace is long, nobody would ever tell of it."""
    ours, theirs = stores.open(refresh_s=0.0, orphan_grace_s=1e9), stores.open()
    pages.put(theirs, [1])
    assert ours.exists(pages.keys([1])) == [True]
    monkeypatch.setattr("kvhoist.storage.file.table.OwnTable._tell", lambda _: None)
    pages.put(theirs, [2])
    assert ours.exists(pages.keys([2])) == [False]
    theirs.close()
    ours._neighbours._next_orphan_check = 0.0
    assert ours.exists(pages.keys([2])) == [True]
    assert pages.read(ours, [1, 2]) == ["good", "good"]
