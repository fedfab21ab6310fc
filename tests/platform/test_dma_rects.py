"""How the dma engine says a copy: in 2-D copies where layers share an allocation, in runs where they do not."""

from __future__ import annotations

import numpy as np
import pytest
from fake_streams import FakePlatform

from kvhoist.copy.dma import DmaCopy
from kvhoist.copy.engine import Between
from kvhoist.copy.plan import CopyPlan
from kvhoist.device_layout import read_device_layout
from kvhoist.geometry import CacheGeometry
from kvhoist.layout import HostOrder
from kvhoist.memory.arena import HostArena
from kvhoist.memory.pinned import PinnedArena
from kvhoist.platform.base import IdArray, MemoryRegion, Rects

LAYERS, BLOCKS, PAGES = 6, 10, 4
GROUP = CacheGeometry.attention(LAYERS, k_row_bytes=64, v_row_bytes=64, page_tokens=8, blocks_per_page=2).groups[0]


class Counting(FakePlatform):
    """Counts copies by kind."""

    def __init__(self, regions: list[MemoryRegion]) -> None:
        super().__init__(None, regions)
        self.num_flat = self.num_tall = 0
        self.heights: set[int] = set()

    def copy_batch(self, sources: IdArray, *rest: object) -> None:
        self.num_flat += len(sources)

    def copy_batch_2d(self, rects: Rects, stream: object) -> None:
        self.num_tall += len(rects.sources)
        self.heights.update(rects.heights.tolist())


@pytest.mark.parametrize(("shared", "flat", "tall"), [(True, 0, 2 * 2 * 3), (False, LAYERS * 2 * 2 * 3, 0)])
def test_layers_of_one_allocation_make_one_copy(shared: bool, flat: int, tall: int) -> None:
    """3 pages of 2 blocks, K and V."""
    layer = (BLOCKS, 4, 64)

    def tensors() -> list[np.ndarray]:
        if shared:
            return list(np.zeros((LAYERS, *layer), np.uint8))
        return [np.zeros(layer, np.uint8) for _ in range(LAYERS)]

    platform = counted({name: tensors() for name in ("k", "v")})
    assert (platform.num_flat, platform.num_tall) == (flat, tall)
    assert platform.heights <= {LAYERS}


@pytest.mark.parametrize(("piece_bytes", "flat", "tall"), [(None, 0, 1), (1024, 4, 0)])
def test_a_tensor_that_is_mapped_in_pieces_gets_no_2d_copies(
    piece_bytes: int | None, flat: int, tall: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's expandable segments do that, and the driver refuses 2-D copies over two pieces. 3 pages of 2 blocks of 4
    tokens, K and V, whose rows lie apart in host pages."""
    if piece_bytes:
        monkeypatch.setattr(Counting, "allocation_of", lambda self, address: address // piece_bytes)
    memory = {name: [np.zeros((BLOCKS, 4, 64), np.uint8) for _ in range(LAYERS)] for name in ("k", "v")}
    platform = counted(memory, HostOrder.PAGE_FIRST)
    assert (platform.num_flat, platform.num_tall) == (flat * LAYERS * 2 * 2 * 3, tall * LAYERS * 2 * 2 * 3)


def counted(memory: dict[str, list[np.ndarray]], order: HostOrder = HostOrder.PAGE_FIRST_DIRECT) -> Counting:
    """Offload 3 pages by dma."""
    cache = read_device_layout(GROUP, memory, "block token dim")
    platform = Counting(list(cache.buffers))
    with (
        HostArena(GROUP, num_pages=PAGES, order=order) as arena,
        PinnedArena(arena, platform) as host,  # type: ignore[arg-type]
    ):
        plan = CopyPlan.make(cache.layout, arena.layout)
        engine = DmaCopy(Between(plan, cache.buffers, host, platform, loads=False))  # type: ignore[arg-type]
        engine.start(np.arange(3), np.arange(6), None).marks[-1][1].wait(10)
    return platform
