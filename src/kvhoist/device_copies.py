"""Copies of a rank whose device has streams of its own, by the staged engine; and which copies a platform needs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from kvhoist.config import DEFAULT_STAGING_BYTES
from kvhoist.copies import MISMATCH, Copied, Copies, Finish, HostCopies, ids_of, plans_between
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.reference import BoundPlan
from kvhoist.copy.staged import StagedCopy, Staging
from kvhoist.device_layout import DeviceCache
from kvhoist.layout import HostOrder
from kvhoist.memory.arena import HostArena
from kvhoist.memory.pinned import PinnedArena
from kvhoist.messages import LEFT_OUT, Job
from kvhoist.platform.base import Event, IdArray, Platform, Priority, region_of
from kvhoist.transfer import Transfer
from kvhoist.verify import PageDigests, page_as_blocks

_LOAD_GROUPS = 4
"""Layer groups of a load: a prefill may start when the first is there. Each costs a copy a page to enqueue."""


def make_copies(
    device: DeviceCache,
    arena: HostArena,
    platform: Platform,
    io_backend: str,
    *,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    debug_verify: bool = False,
) -> Copies:
    """Return the copies that the platform needs. Raises ConfigError as `choose_engine` does and for a ring that cannot
    pass a page; DeviceError where the device has no room for the ring, or the driver does not pin the arena."""
    if platform.capabilities.host_visible:
        return HostCopies(device, arena, platform, io_backend, debug_verify=debug_verify)
    return StagedCopies(device, arena, platform, io_backend, staging_bytes=staging_bytes, debug_verify=debug_verify)


class StagedCopies:
    """Both directions by the staged engine, over one ring. Owns the ring, the streams and the arena's registration."""

    def __init__(
        self,
        device: DeviceCache,
        arena: HostArena,
        platform: Platform,
        io_backend: str,
        *,
        staging_bytes: int,
        debug_verify: bool,
    ) -> None:
        offload, load = self.plans = plans_between(device, arena, platform, io_backend)
        with contextlib.ExitStack() as undo:
            host = undo.enter_context(PinnedArena(arena, platform)).region
            staging = undo.enter_context(Staging(platform, arena, staging_bytes))
            self._offload = StagedCopy(offload, device.buffers, host, staging, Priority.NORMAL, loads=False)
            groups = _LOAD_GROUPS if arena.layout.name == HostOrder.PAGE_FIRST_DIRECT else 1
            self._load = StagedCopy(load, device.buffers, host, staging, Priority.HIGH, loads=True, num_groups=groups)
            self._digests = _digests(device, arena, platform, staging, undo) if debug_verify else None
            self._undo = undo.pop_all()

    def offload(self, job: Job, after: Event | None, transfer: Transfer) -> Finish:
        blocks, pages = self.plans[0].check_ids(ids_of(job.device_blocks), ids_of(job.host_pages))
        marks, read = self._offload.start(pages, blocks, after)
        transfer.enqueued(marks, read)

        def finish() -> Copied:
            marks[-1][1].wait()
            self.arrived(job.host_pages)
            return Copied(job.num_pages * self.plans[0].page_bytes)

        return finish

    def load(self, job: Job, after: Event | None, transfer: Transfer) -> Finish:
        pages, blocks = self.plans[1].check_ids(ids_of(job.host_pages), ids_of(job.device_blocks))
        num_bytes = int((blocks != LEFT_OUT).sum()) * (job.num_pages * self.plans[1].page_bytes // len(blocks))
        marks, read = self._load.start(pages, blocks, after)
        if self._digests is None:
            transfer.enqueued(marks, read)

        def finish() -> Copied:
            marks[-1][1].wait()
            wrong = self._digests.mismatches(job.host_pages, blocks) if self._digests else ()
            return Copied(num_bytes, wrong, MISMATCH if wrong else None)

        return finish

    def arrived(self, host_pages: Sequence[int]) -> None:
        if self._digests:
            self._digests.remember(host_pages)

    def close(self) -> None:
        self._offload.synchronize()
        self._load.synchronize()
        self._undo.close()


def _digests(
    device: DeviceCache, arena: HostArena, platform: Platform, staging: Staging, undo: contextlib.ExitStack
) -> PageDigests:
    """Return digests that read the device back through pinned memory of one page."""
    group = device.layout.group
    scratch = np.zeros(group.page_pitch_bytes, dtype=np.uint8)
    raw = undo.enter_context(HostArena(group, num_pages=1, order=HostOrder(arena.layout.name)))
    pinned = undo.enter_context(PinnedArena(raw, platform))
    plan = CopyPlan.make(device.layout, raw.layout)
    gather = StagedCopy(plan, device.buffers, pinned.region, staging, Priority.NORMAL, loads=False)
    blocks_of_page = page_as_blocks(arena)
    overlay = BoundPlan(CopyPlan.make(blocks_of_page, blocks_of_page), (raw.region,), (region_of(scratch),))
    first_page = np.zeros(1, dtype=np.int64)

    def read_back(blocks: IdArray, places: IdArray) -> None:
        if not len(blocks):
            return
        whole = np.full(gather.ids_per_page, blocks[0])
        whole[places if len(places) == len(blocks) else slice(None)] = blocks
        marks, _ = gather.start(first_page, whole, None)
        marks[-1][1].wait()
        overlay.copy(places, places)

    return PageDigests(device.layout, arena, scratch, read_back)
