"""`debug_verify`: does the device hold, after a load, the bytes that were offloaded?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvhoist.checksum import checksum
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.reference import BoundPlan
from kvhoist.device_layout import DeviceCache
from kvhoist.layout import HostOrder, Layout, Unit, host_layout
from kvhoist.memory.arena import HostArena
from kvhoist.messages import LEFT_OUT
from kvhoist.platform.base import ByteArray, IdArray, region_of

ReadBack = Callable[[IdArray, IdArray], None]
"""Copies device units (first argument) to the blocks of a scratch page (second argument)."""


class PageDigests:
    """One digest a host page, taken when its bytes arrive; compared with what the device holds after a load.

    Reads the device back into a scratch page, block by block. `remember` and `mismatches` may run in different threads,
    for different pages: a page in flight belongs to one job. `mismatches` is for one thread at a time.
    """

    def __init__(self, layout: Layout, arena: HostArena, scratch: ByteArray, read_back: ReadBack) -> None:
        group = layout.group
        self._arena = arena
        self._digests: dict[int, bytes] = {}
        self._ids_per_page = group.blocks_per_page if layout.unit is Unit.BLOCK else 1
        self._places = np.arange(group.blocks_per_page).reshape(self._ids_per_page, -1)
        self._blob = scratch.data[: group.page_bytes]
        self._read_back = read_back

    @classmethod
    def of_host(cls, device: DeviceCache, arena: HostArena) -> PageDigests:
        """Digests where the CPU can address the device's memory."""
        scratch = np.zeros(device.layout.group.page_pitch_bytes, dtype=np.uint8)
        plan = CopyPlan.make(device.layout, page_as_blocks(arena))
        bound = BoundPlan(plan, device.buffers, (region_of(scratch),))

        def read_back(blocks: IdArray, places: IdArray) -> None:
            bound.copy(blocks, places)

        return cls(device.layout, arena, scratch, read_back)

    def remember(self, host_pages: Sequence[int]) -> None:
        """Take the digests of pages whose bytes have just arrived in the arena."""
        for page in host_pages:
            self._digests[page] = checksum(self._arena.page(page))

    def mismatches(self, host_pages: Sequence[int], device_blocks: IdArray) -> tuple[int, ...]:
        """Return the indices of pages whose device copy has another digest than was remembered, or none was. Where a
        block was left out of the load, the host page's own bytes stand for it."""
        wrong = []
        for i, page in enumerate(host_pages):
            blocks = device_blocks[i * self._ids_per_page : (i + 1) * self._ids_per_page]
            written = blocks != LEFT_OUT
            if not written.all():
                self._blob[:] = self._arena.page(page)
            self._read_back(blocks[written], self._places[written].ravel())
            if checksum(self._blob) != self._digests.get(page):
                wrong.append(i)
        return tuple(wrong)


def page_as_blocks(arena: HostArena) -> Layout:
    """Return the layout of one host page, seen as the blocks that it holds."""
    group = arena.layout.group
    pages = host_layout(group, 1, HostOrder(arena.layout.name))
    components = tuple(
        replace(
            placed,
            unit_stride_bytes=group.rows_per_block(component) * placed.row_stride_bytes,
            num_rows=group.rows_per_block(component),
        )
        for component, placed in zip(group.components, pages.components, strict=True)
    )
    return replace(pages, unit=Unit.BLOCK, num_units=group.blocks_per_page, components=components)
