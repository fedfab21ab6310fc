"""One arm of `kvhoist.bench.migration`: products and a copy, again and again, while the kernel is asked to move pages.

The host memory is kvhoist's own, as a cache has it: a `HostArena` that is pinned or driver-owned, as the platform and
the environment have it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvhoist.bench.migration_kernel import Kernel
from kvhoist.errors import KvhoistError
from kvhoist.geometry import CacheGeometry
from kvhoist.memory.arena import HostArena
from kvhoist.memory.pinned import PinnedArena, touch_threads
from kvhoist.platform.base import Platform, Stream
from kvhoist.platform.page_moves import PAGE_BYTES, answer_name

GROUP = CacheGeometry.attention(32, k_row_bytes=1024, v_row_bytes=1024, page_tokens=64).groups[0]
"""Pages of 4 MiB."""

COPY_BYTES = 16 << 20
MOVE_BYTES = 2 << 20
NUM_MOVES = 3

_COPY_PAGES = COPY_BYTES // GROUP.page_pitch_bytes
_WARM_UP = 20
_COMPARE_EACH = 50
"""Iterations between two comparisons, which are not timed: they would be most of the time."""


@dataclass(frozen=True, slots=True)
class Rig:
    """What an arm runs on. `compute` enqueues a model's work into `stream`, as `platform.copy` does."""

    platform: Platform
    stream: Stream
    compute: Callable[[], object]
    kernel: Kernel


def measure(rig: Rig, *, pool_bytes: int, iterations: int) -> dict[str, Any]:
    """Run `iterations` after each of three attempts to move 2 MiB to another node and back, beside them, in a pool of
    `pool_bytes` (at least 32 MiB), and return plain data:

    `times_s`: seconds of each iteration, a list an attempt; `migrations`: what became of each of the six moves;
    `evicted_ms`: for which the driver evicted the process's queues meanwhile; `compared`: how many copies were compared
    whole. Raises KvhoistError where other bytes arrived than were sent.
    """
    pages = pool_bytes // GROUP.page_pitch_bytes
    allocate = rig.platform.allocate_host
    arena = HostArena(GROUP, num_pages=pages, first_touch_threads=touch_threads(rig.platform), allocate=allocate)
    moved = _pages(arena, 0, NUM_MOVES * MOVE_BYTES)
    rig.kernel.move(moved, _home(rig.kernel, moved))  # threads on several nodes may have touched them first
    pinned = PinnedArena(arena, rig.platform)
    try:
        return _measure(rig, arena, pinned, iterations)
    finally:
        rig.stream.synchronize()
        pinned.close()
        del pinned
        arena.close()


def _measure(rig: Rig, arena: HostArena, pinned: PinnedArena, iterations: int) -> dict[str, Any]:
    line = _Line(rig, arena, pinned)
    for _ in range(_WARM_UP):
        line.iterate()
    line.compare()
    evicted_before_ms = rig.kernel.evicted_ms()
    times: list[list[float]] = []
    migrations: list[dict[str, Any]] = []
    with ThreadPoolExecutor(1, thread_name_prefix="kvhoist-migrate") as pool:
        for attempt in range(NUM_MOVES):
            moves = pool.submit(migrate, rig.kernel, _pages(arena, attempt * MOVE_BYTES, MOVE_BYTES))
            times.append([])
            for number in range(iterations):
                times[-1].append(line.iterate())
                if number % _COMPARE_EACH == _COMPARE_EACH - 1 or number == iterations - 1:
                    line.compare()
            migrations += [{"attempt": attempt + 1, **move} for move in moves.result()]
    return {
        "times_s": times,
        "migrations": migrations,
        "evicted_ms": rig.kernel.evicted_ms() - evicted_before_ms,
        "compared": line.compared,
    }


def migrate(kernel: Kernel, pages: list[int]) -> list[dict[str, Any]]:
    """Try to move `pages` to another node and back, and return what became of either: `moved`, the pages that were
    elsewhere before and are on the node now; `answers` of the call, and where the pages `are` after it, by how many."""
    home = _home(kernel, pages)
    away = next(node for node in kernel.nodes if node != home)
    found = []
    for node in (away, home):
        before = kernel.where(pages)
        began = time.perf_counter()
        answers = kernel.move(pages, node)
        seconds = time.perf_counter() - began
        after = kernel.where(pages)
        found.append(
            {
                "to_node": node,
                "pages": len(pages),
                "moved": sum(was != node and now == node for was, now in zip(before, after, strict=True)),
                "answers": _counted(answers),
                "are": _counted(after),
                "ms": seconds * 1e3,
            }
        )
    return found


def _pages(arena: HostArena, start: int, num_bytes: int) -> list[int]:
    first = arena.region.address + start
    return list(range(first, first + num_bytes, PAGE_BYTES))


def _home(kernel: Kernel, pages: list[int]) -> int:
    """Return the node that has most of `pages`; any where the kernel knows none of them."""
    nodes = Counter(node for node in kernel.where(pages) if node in kernel.nodes)
    return nodes.most_common(1)[0][0] if nodes else kernel.nodes[0]


def _counted(answers: list[int]) -> dict[str, int]:
    return dict(Counter(map(answer_name, answers)).most_common())


class _Line:
    """16 MiB at the start of an arena that are copied to the device; what arrived comes back beside them."""

    def __init__(self, rig: Rig, arena: HostArena, pinned: PinnedArena) -> None:
        self._rig = rig
        self._sent, self._back = arena.buffer[:COPY_BYTES], arena.buffer[COPY_BYTES : 2 * COPY_BYTES]
        self._sent[:] = np.random.default_rng(5).integers(0, 256, COPY_BYTES, dtype=np.uint8)
        self._stamps = self._sent.view(np.uint64)[:: PAGE_BYTES // 8]
        self._from, self._to = pinned.device_addresses(np.array([0, _COPY_PAGES])).tolist()
        self._target = rig.platform.allocate(COPY_BYTES)
        self._done = 0
        self.compared = 0

    def iterate(self) -> float:
        """Do one iteration and return its seconds. No two send the same bytes in any page."""
        first = self._done * len(self._stamps)
        self._stamps[:] = np.arange(first, first + len(self._stamps), dtype=np.uint64)
        self._done += 1
        began = time.perf_counter()
        self._rig.compute()
        self._rig.platform.copy(self._from, self._target.address, COPY_BYTES, self._rig.stream)
        self._rig.stream.synchronize()
        return time.perf_counter() - began

    def compare(self) -> None:
        """Fetch what arrived last and compare it whole with what was sent. Raises KvhoistError."""
        self._rig.platform.copy(self._target.address, self._to, COPY_BYTES, self._rig.stream)
        self._rig.stream.synchronize()
        self.compared += 1
        wrong = np.flatnonzero(self._sent != self._back)
        if len(wrong):
            raise KvhoistError(
                "other bytes arrived on the device than were sent",
                got=f"{len(wrong)} wrong bytes of {COPY_BYTES}, the first at {wrong[0]}, in iteration {self._done}",
                expected="none, whatever pages move",
            )
