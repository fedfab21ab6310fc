"""Pinned host memory: pieces that never split a page, and nothing half pinned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_streams import FakePlatform
from stream_rank import GROUP

from kvhoist.errors import DeviceError
from kvhoist.memory.arena import HostArena
from kvhoist.memory.pinned import PinnedArena
from kvhoist.platform.base import MemoryRegion


@pytest.fixture
def arena() -> Iterator[HostArena]:
    with HostArena(GROUP, num_pages=10) as held:
        yield held


def test_pieces_that_are_pinned_never_split_a_page(arena: HostArena) -> None:
    platform = FakePlatform(None, [])
    pitch = GROUP.page_pitch_bytes
    with PinnedArena(arena, platform, piece_bytes=3 * pitch + 100) as pinned:  # type: ignore[arg-type]
        assert pinned.num_pieces == 4
        lengths = [region.num_bytes for region in platform.registered]
        assert lengths == [3 * pitch, 3 * pitch, 3 * pitch, pitch]
        assert all((region.address - arena.region.address) % pitch == 0 for region in platform.registered)
    assert platform.registered == []


def test_what_was_pinned_before_a_refusal_is_unpinned(arena: HostArena, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = FakePlatform(None, [])
    register, calls = platform.register, iter(range(10))

    def refusing(region: MemoryRegion) -> Any:
        if next(calls) == 2:
            raise DeviceError("CUDA failed in pinning", got="CUDA_ERROR_OUT_OF_MEMORY (2)")
        return register(region)

    monkeypatch.setattr(platform, "register", refusing)
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        PinnedArena(arena, platform, piece_bytes=GROUP.page_pitch_bytes)  # type: ignore[arg-type]
    assert platform.registered == []
