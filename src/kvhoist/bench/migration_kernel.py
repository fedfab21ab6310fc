"""Who moves the pages of `kvhoist.bench.migration`: Linux beside AMD's driver, or what stands for both."""

from __future__ import annotations

import ctypes
import errno
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvhoist.bench.kfd import KfdProcess
from kvhoist.platform.page_moves import PAGE_BYTES, move_pages, page_nodes


class Kernel(Protocol):
    """Moves pages, tells where they are, and counts for how long a device's queues were evicted. Thread-safe.

    nodes: the memory nodes between which pages move, two or more.
    """

    nodes: tuple[int, ...]

    def where(self, pages: Sequence[int]) -> list[int]:
        """As `kvhoist.platform.page_moves.page_nodes`."""
        ...

    def move(self, pages: Sequence[int], node: int) -> list[int]:
        """As `kvhoist.platform.page_moves.move_pages`."""
        ...

    def evicted_ms(self) -> float:
        """Return the milliseconds for which the process's queues were evicted, since it started."""
        ...


class LinuxKernel:
    """The machine's."""

    def __init__(self, nodes: tuple[int, ...], process: KfdProcess) -> None:
        self.nodes = nodes
        self._process = process

    def where(self, pages: Sequence[int]) -> list[int]:
        return page_nodes(pages)

    def move(self, pages: Sequence[int], node: int) -> list[int]:
        return move_pages(pages, node)

    def evicted_ms(self) -> float:
        return self._process.evicted_ms()


class SimulatedKernel:
    """A kernel with two memory nodes, in this process. What it moves it copies to another place, though nobody looks
    there; meanwhile queues stand still, which is work in a block of `queues`. `driver_owned`: the pages are a driver's,
    of which Linux knows none."""

    def __init__(self, *, driver_owned: bool) -> None:
        self.nodes: tuple[int, ...] = (0, 1)
        self._driver_owned = driver_owned
        self._queues = threading.Lock()
        self._places: dict[int, tuple[int, bytes]] = {}
        self._evicted_s = 0.0

    def queues(self) -> AbstractContextManager[object]:
        """Return a block that does not run while queues are evicted, or the other way round."""
        return self._queues

    def where(self, pages: Sequence[int]) -> list[int]:
        if self._driver_owned:
            return [-errno.EFAULT] * len(pages)
        return [self._places[page][0] if page in self._places else 0 for page in pages]

    def move(self, pages: Sequence[int], node: int) -> list[int]:
        if self._driver_owned:
            return [-errno.EFAULT] * len(pages)
        with self._queues:
            began = time.perf_counter()
            for page in pages:
                self._places[page] = node, ctypes.string_at(page, PAGE_BYTES)
            self._evicted_s += time.perf_counter() - began
        return [node] * len(pages)

    def evicted_ms(self) -> float:
        return self._evicted_s * 1e3
