"""`debug_verify`: does the device hold, after a load, the bytes that were offloaded?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_128_digest

from kvhoist.copy.reference import BoundPlan
from kvhoist.layout import host_layout
from kvhoist.memory.arena import HostArena
from kvhoist.platform.base import IdArray, regions_of


class PageDigests:
    """One digest a host page, taken when its bytes arrive; compared with what the device holds after a load.

    Reads the device back into a scratch page through the offload plan. `remember` and `mismatches` may run in different
    threads, for different pages: a page in flight belongs to one job.
    """

    def __init__(self, offload: BoundPlan, arena: HostArena) -> None:
        self.num_mismatches = 0
        self._arena = arena
        self._digests: dict[int, bytes] = {}
        group = offload.plan.group
        self._blocks_per_page = group.blocks_per_page
        self._scratch = np.zeros(group.page_pitch_bytes, dtype=np.uint8)
        self._blob = memoryview(self._scratch)[: group.page_bytes]
        self._read_back = offload.to(host_layout(group, 1, arena.order), regions_of([self._scratch]))

    def remember(self, host_pages: Sequence[int]) -> None:
        """Take the digests of pages whose bytes have just arrived in the arena."""
        for page in host_pages:
            self._digests[page] = xxh3_128_digest(self._arena.page(page))

    def mismatches(self, host_pages: Sequence[int], device_blocks: IdArray) -> tuple[int, ...]:
        """Return the indices of the pages whose device copy has another digest. Pages never remembered count as one."""
        wrong = []
        scratch_page = np.zeros(1, dtype=np.int64)
        for i, page in enumerate(host_pages):
            blocks = device_blocks[i * self._blocks_per_page : (i + 1) * self._blocks_per_page]
            self._read_back.copy(blocks, scratch_page)
            if xxh3_128_digest(self._blob) != self._digests.get(page):
                wrong.append(i)
        self.num_mismatches += len(wrong)
        return tuple(wrong)
