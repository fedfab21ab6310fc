"""HostArena: the host tier's memory, exactly as many bytes as its pages need."""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np

from kvhoist.affinity import on_any_core
from kvhoist.errors import ClosedError, ConfigError, HostMemoryError, PageIdError
from kvhoist.geometry import CacheGroup
from kvhoist.layout import HostOrder, Layout, host_layout
from kvhoist.memory.budget import Budget, host_budget
from kvhoist.platform.base import ByteArray, MemoryRegion
from kvhoist.platform.cpu import host_view
from kvhoist.private_memory import private_memory
from kvhoist.units import format_bytes, parse_bytes

_log = logging.getLogger(__name__)

_TOUCH_BYTES = 64 << 20


class HostArena:
    """Anonymous private memory for `num_pages` host pages, each `group.page_pitch_bytes` after the one before, the
    first at a 4 KiB boundary. The kernel gives the memory zeroed, on first touch.

    Views (`page`, `buffer`, `region`) hold the mapping: memory cannot be taken from under them. `close` therefore frees
    at once only what no view holds; it says in the log how much is still held, `held_bytes` says so at any later time,
    and the last view frees it. Thread-safe, but for `close` against itself.
    """

    def __init__(
        self,
        group: CacheGroup,
        *,
        num_pages: int | None = None,
        host_bytes: int | str | None = None,
        order: HostOrder = HostOrder.PAGE_FIRST_DIRECT,
        first_touch_threads: int = 0,
        budget: Budget | None = None,
        allocate: Callable[[int], MemoryRegion | None] | None = None,
    ) -> None:
        """Map memory for `num_pages` pages, or for as many whole pages as `host_bytes` hold.

        With `first_touch_threads` every page is backed before this returns, else on first use. `budget` defaults to
        `host_budget()`. `allocate` (`Platform.allocate_host`) may give other memory for so many bytes, or None. Raises
        as that does, and HostMemoryError for what the machine, a cgroup or a limit of this process does not have,
        ConfigError for neither or both sizes, sizes that hold no page, or an order that has no page pitch.
        """
        self._group = group
        self._num_pages = _num_pages(group, num_pages, host_bytes)
        if order is HostOrder.LAYER_FIRST:
            raise ConfigError(
                "a host arena cannot be layer_first: its pages are not contiguous",
                choices=[HostOrder.PAGE_FIRST_DIRECT, HostOrder.PAGE_FIRST],
            )
        self._layout = host_layout(group, self._num_pages, order)
        self._num_bytes = self._num_pages * group.page_pitch_bytes
        budget = budget or host_budget()
        if self._num_bytes > budget.available_bytes:
            raise _no_memory(self._num_bytes, budget)
        given = allocate(self._num_bytes) if allocate else None
        memory: Any = _map(self._num_bytes, budget) if given is None else given.owner
        self._memory = weakref.ref(memory)
        self._buffer: ByteArray | None = np.frombuffer(memory, np.uint8) if given is None else host_view(given)
        if first_touch_threads > 0 and given is None:
            _touch(self._buffer, first_touch_threads)

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_bytes(self) -> int:
        """Bytes mapped: `num_pages * page_pitch_bytes`."""
        return self._num_bytes

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def buffer(self) -> ByteArray:
        """All bytes, as a writable uint8 array. Raises ClosedError after close."""
        if self._buffer is None:
            raise ClosedError("the host arena is closed", remedy="Make a new one; its pages are gone.")
        return self._buffer

    @property
    def region(self) -> MemoryRegion:
        """The memory as a region that holds it: the single buffer of `layout`. Raises ClosedError after close."""
        buffer = self.buffer
        return MemoryRegion(buffer.__array_interface__["data"][0], buffer.nbytes, owner=buffer)

    def page(self, page_id: int) -> memoryview:
        """Return the `group.page_bytes` bytes of a page, writable. The view holds the whole arena: drop it when done.

        Raises PageIdError for an id outside of the arena, ClosedError after close.
        """
        if not 0 <= page_id < self._num_pages:
            raise PageIdError(
                "a host page id outside of the arena", got=page_id, expected=f"0 to {self._num_pages - 1}"
            )
        start = page_id * self._group.page_pitch_bytes
        return self.buffer.data[start : start + self._group.page_bytes]

    @property
    def closed(self) -> bool:
        return self._buffer is None

    @property
    def held_bytes(self) -> int:
        """Bytes that are still mapped: all until close; after it, all while any view is alive, then 0."""
        return self._num_bytes if self._memory() is not None else 0

    def close(self) -> None:
        """Give the memory back. Idempotent, never blocks. Where views are alive their bytes stay valid, later calls of
        this arena raise ClosedError, and a warning is logged: a view that outlives its cache is a leak."""
        if self._buffer is None:
            return
        self._buffer = None
        if self.held_bytes:
            _log.warning(
                "host arena closed, but views (page(), buffer, region, bound plans) hold its %s until the last is gone",
                format_bytes(self._num_bytes),
            )

    def __enter__(self) -> HostArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _num_pages(group: CacheGroup, num_pages: int | None, host_bytes: int | str | None) -> int:
    if (num_pages is None) == (host_bytes is None):
        raise ConfigError(
            "a host arena needs one size", got=f"num_pages={num_pages}, host_bytes={host_bytes}", expected="one of them"
        )
    pitch = group.page_pitch_bytes
    if num_pages is None:
        num_bytes = parse_bytes(host_bytes if host_bytes is not None else 0, name="host_bytes")
        num_pages = num_bytes // pitch
        shown = f"host_bytes={num_bytes} for pages of {pitch} B"
    else:
        shown = f"num_pages={num_pages!r}"
    if not isinstance(num_pages, int) or isinstance(num_pages, bool) or num_pages < 1:
        raise ConfigError(
            "a host arena without a whole page",
            got=shown,
            expected=f"at least one page ({format_bytes(pitch)})",
            remedy="Give more host memory, or use a smaller page_tokens.",
        )
    return num_pages


def _map(num_bytes: int, budget: Budget) -> mmap.mmap:
    try:
        memory = private_memory(num_bytes)
    except (OSError, OverflowError) as error:
        raise _no_memory(num_bytes, budget) from error
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages: more TLB misses, nothing else
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _no_memory(num_bytes: int, budget: Budget) -> HostMemoryError:
    return HostMemoryError(
        "the host tier does not fit in memory",
        got=format_bytes(num_bytes),
        expected=f"at most {format_bytes(budget.available_bytes)}, by {budget.tightest}",
        remedy="Lower host_bytes, or raise that limit.",
    )


def _touch(buffer: ByteArray, num_threads: int) -> None:
    """Write one byte of every 4 KiB, so that the kernel backs the memory now (numpy releases the GIL)."""

    def touch(start: int) -> None:
        buffer[start : start + _TOUCH_BYTES : mmap.PAGESIZE] = 0

    with on_any_core(), ThreadPoolExecutor(num_threads, thread_name_prefix="kvhoist-touch") as pool:
        for _ in pool.map(touch, range(0, len(buffer), _TOUCH_BYTES)):
            pass
