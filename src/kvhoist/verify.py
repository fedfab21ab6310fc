"""`debug_verify`: does the device hold, after a load, the bytes that were offloaded?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_128_digest

from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.reference import BoundPlan
from kvhoist.device_layout import DeviceCache
from kvhoist.layout import HostOrder, host_layout
from kvhoist.memory.arena import HostArena
from kvhoist.platform.base import IdArray, region_of


class PageDigests:
    """One digest a host page, taken when its bytes arrive; compared with what the device holds after a load.

    Reads the device back into a scratch page. `remember` and `mismatches` may run in different threads, for different
    pages: a page in flight belongs to one job. `mismatches` is for one thread at a time.
    """

    def __init__(self, device: DeviceCache, arena: HostArena) -> None:
        group = device.layout.group
        scratch = np.zeros(group.page_pitch_bytes, dtype=np.uint8)
        plan = CopyPlan.make(device.layout, host_layout(group, 1, HostOrder(arena.layout.name)))
        self._arena = arena
        self._digests: dict[int, bytes] = {}
        self._blocks_per_page = group.blocks_per_page
        self._blob = scratch.data[: group.page_bytes]
        self._read_back = BoundPlan(plan, device.buffers, (region_of(scratch),))

    def remember(self, host_pages: Sequence[int]) -> None:
        """Take the digests of pages whose bytes have just arrived in the arena."""
        for page in host_pages:
            self._digests[page] = xxh3_128_digest(self._arena.page(page))

    def mismatches(self, host_pages: Sequence[int], device_blocks: IdArray) -> tuple[int, ...]:
        """Return the indices of pages whose device copy has another digest than was remembered, or none was."""
        wrong = []
        scratch_page = np.zeros(1, dtype=np.int64)
        for i, page in enumerate(host_pages):
            blocks = device_blocks[i * self._blocks_per_page : (i + 1) * self._blocks_per_page]
            self._read_back.copy(blocks, scratch_page)
            if xxh3_128_digest(self._blob) != self._digests.get(page):
                wrong.append(i)
        return tuple(wrong)
