"""The host arena: exact bytes, refused when they are not there, and gone when it is closed."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvhoist.errors import ClosedError, ConfigError, HostMemoryError, PageIdError
from kvhoist.geometry import CacheGeometry
from kvhoist.layout import HostOrder, host_layout
from kvhoist.memory.arena import HostArena
from kvhoist.memory.budget import Budget, Limit

GROUP = CacheGeometry.attention(2, k_row_bytes=96, v_row_bytes=96, page_tokens=16).groups[0]


def budget(num_bytes: int) -> Budget:
    return Budget((Limit("cgroup v2", num_bytes, 1 << 30, "/sys/fs/cgroup/x/memory.max"),))


def resident_bytes(start: int, end: int) -> int:
    """Return how much of these addresses is backed by memory: other tests' threads change the process's total."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) < end and int(bounds[2], 16) > start
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def test_pages_are_whole_aligned_and_apart() -> None:
    with HostArena(GROUP, num_pages=3) as arena:
        assert arena.num_bytes == 3 * GROUP.page_pitch_bytes == arena.region.num_bytes == len(arena.buffer)
        assert arena.region.address % 4096 == 0
        assert arena.layout == host_layout(GROUP, 3)
        assert not arena.buffer.any()
        for i in range(3):
            page = arena.page(i)
            assert (len(page), page.format, page.readonly, page.contiguous) == (GROUP.page_bytes, "B", False, True)
            page[:] = bytes([i + 1]) * len(page)
        pages = arena.buffer.reshape(3, -1)
        assert (pages[:, : GROUP.page_bytes] == np.array([[1], [2], [3]])).all()
        assert not pages[:, GROUP.page_bytes :].any()
        del page, pages


def test_host_bytes_hold_as_many_whole_pages_as_fit() -> None:
    pitch = GROUP.page_pitch_bytes
    for host_bytes, pages in ((pitch, 1), (pitch + 1, 1), (2 * pitch - 1, 1), (2 * pitch, 2), (f"{pitch * 5}B", 5)):
        with HostArena(GROUP, host_bytes=host_bytes) as arena:
            assert arena.num_pages == pages


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_pages": 2, "host_bytes": 1 << 20},
        {"num_pages": 0},
        {"num_pages": -1},
        {"num_pages": 1.5},
        {"num_pages": True},
        {"host_bytes": 0},
        {"host_bytes": -4096},
        {"host_bytes": 100},
        {"host_bytes": "lots"},
        {"host_bytes": 1 << 70},
        {"num_pages": 2, "order": HostOrder.LAYER_FIRST},
    ],
)
def test_sizes_that_are_no_sizes_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        HostArena(GROUP, **sizes)


def test_what_does_not_fit_is_refused_with_what_there_is_and_what_to_do() -> None:
    with pytest.raises(HostMemoryError) as caught:
        HostArena(GROUP, num_pages=10, budget=budget(9 * GROUP.page_pitch_bytes))
    for part in ("got 80.0 KiB", "at most 72.0 KiB", "cgroup v2", "memory.max", "Lower host_bytes"):
        assert part in str(caught.value)
    HostArena(GROUP, num_pages=9, budget=budget(9 * GROUP.page_pitch_bytes)).close()
    with pytest.raises(HostMemoryError):
        HostArena(GROUP, host_bytes="512TiB")
    with pytest.raises(HostMemoryError, match="TiB"):  # the kernel's own refusal, where no budget knew better
        HostArena(GROUP, host_bytes="900000TiB", budget=budget(1 << 60))


@pytest.mark.parametrize("page", [-1, 3, 1 << 40])
def test_a_page_outside_is_refused(page: int) -> None:
    with HostArena(GROUP, num_pages=3) as arena, pytest.raises(PageIdError, match="0 to 2"):
        arena.page(page)


def test_first_touch_backs_every_page_and_closing_gives_it_back_at_once() -> None:
    arena = HostArena(GROUP, host_bytes="96MiB", first_touch_threads=2)
    start, end = arena.region.address, arena.region.address + arena.num_bytes
    assert resident_bytes(start, end) >= arena.num_bytes > 90 << 20
    arena.close()
    assert arena.held_bytes == 0
    assert resident_bytes(start, end) < 10 << 20


def test_use_after_close_is_refused() -> None:
    arena = HostArena(GROUP, num_pages=3)
    assert not arena.closed
    arena.close()
    arena.close()
    assert arena.closed
    for use in (lambda: arena.page(0), lambda: arena.buffer, lambda: arena.region):
        with pytest.raises(ClosedError, match="closed"):
            use()


@pytest.mark.parametrize("view_of", [lambda a: a.page(1), lambda a: a.buffer[5:9], lambda a: a.region])
def test_a_view_that_outlives_the_arena_is_valid_and_reported_until_it_goes(
    view_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    arena = HostArena(GROUP, num_pages=3)
    arena.buffer[:] = 9
    view = view_of(arena)
    with caplog.at_level(logging.WARNING):
        arena.close()
    assert "hold its 24.0 KiB until the last is gone" in caplog.text
    assert arena.held_bytes == arena.num_bytes
    if not hasattr(view, "address"):
        assert bytes(view[:4]) == b"\x09" * 4
    del view
    assert arena.held_bytes == 0


def test_closing_without_views_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with HostArena(GROUP, num_pages=3) as arena:
        arena.page(0)[:4] = b"abcd"
    assert not caplog.records
    assert arena.held_bytes == 0
