"""Copies of a rank whose device has streams of its own; and which copies a platform needs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from kvhoist.config import DEFAULT_STAGING_BYTES
from kvhoist.copies import MISMATCH, Copied, Copies, Finish, HostCopies, ids_of, plans_between
from kvhoist.copy.engine import Between, CopyEngine
from kvhoist.copy.engines import EngineMaker
from kvhoist.copy.plan import CopyPlan, EngineChoice
from kvhoist.copy.reference import BoundPlan
from kvhoist.device_layout import DeviceCache
from kvhoist.errors import ConfigError, DeviceError
from kvhoist.layout import HostOrder
from kvhoist.memory.arena import HostArena
from kvhoist.memory.pinned import PinnedArena
from kvhoist.messages import LEFT_OUT, Job
from kvhoist.platform.base import Event, IdArray, Platform, region_of
from kvhoist.transfer import Transfer
from kvhoist.verify import PageDigests, page_as_blocks


def make_copies(
    device: DeviceCache,
    arena: HostArena,
    platform: Platform,
    io_backend: str,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    *,
    block_quota: int | None = None,
    debug_verify: bool = False,
) -> Copies:
    """Return the copies that the platform needs. Raises ConfigError as `choose_engines` does, for a ring that cannot
    pass a page and for a cache on another device; DeviceError where the device has no room for the ring, or the driver
    does not pin the arena."""
    if device.device != platform.device:
        raise ConfigError(
            "the cache lies on another device than its platform's",
            got=f"tensors on {device.device}, a platform of {platform.device}",
            remedy="Open the platform of the cache's device.",
        )
    if platform.capabilities.host_visible:
        return HostCopies(device, arena, platform, io_backend, debug_verify=debug_verify)
    return DeviceCopies(
        device, arena, platform, io_backend, staging_bytes, block_quota=block_quota, debug_verify=debug_verify
    )


class DeviceCopies:
    """Both directions, each by the engines of its plan. Owns what they share, and the arena's registration."""

    def __init__(
        self,
        device: DeviceCache,
        arena: HostArena,
        platform: Platform,
        io_backend: str,
        staging_bytes: int,
        *,
        block_quota: int | None,
        debug_verify: bool,
    ) -> None:
        self.plans = plans_between(device, arena, platform, io_backend, staging_bytes)
        with contextlib.ExitStack() as undo:
            host = undo.enter_context(PinnedArena(arena, platform))
            make = undo.enter_context(EngineMaker(platform, arena, staging_bytes, block_quota))
            self._offloads, self._loads = (
                _engines_of(Between(plan, device.buffers, host, platform, loads), make)
                for plan, loads in zip(self.plans, (False, True), strict=True)
            )
            self._digests = _digests(device, arena, platform, make, self.plans[0], undo) if debug_verify else None
            self._undo = undo.pop_all()

    def offload(self, job: Job, after: Event | None, transfer: Transfer) -> Finish:
        blocks, pages = self.plans[0].check_ids(ids_of(job.device_blocks), ids_of(job.host_pages))
        marks, read = self._offloads[self.plans[0].choice_for(job.num_pages)].start(pages, blocks, after)
        transfer.enqueued(marks, read)

        def finish() -> Copied:
            marks[-1][1].wait()
            self.arrived(job.host_pages)
            return Copied(job.num_pages * self.plans[0].page_bytes)

        return finish

    def load(self, job: Job, after: Event | None, transfer: Transfer) -> Finish:
        pages, blocks = self.plans[1].check_ids(ids_of(job.host_pages), ids_of(job.device_blocks))
        num_bytes = int((blocks != LEFT_OUT).sum()) * (job.num_pages * self.plans[1].page_bytes // len(blocks))
        marks, read = self._loads[self.plans[1].choice_for(job.num_pages)].start(pages, blocks, after)
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
        for engine in (*self._offloads.values(), *self._loads.values()):
            with contextlib.suppress(DeviceError):  # of a device that is gone nothing is under way
                engine.synchronize()
        self._undo.close()


def _engines_of(between: Between, make: EngineMaker) -> dict[EngineChoice, CopyEngine]:
    return {choice: make(choice.engine, between, choice.num_groups) for choice in between.plan.choices}


def _digests(
    device: DeviceCache,
    arena: HostArena,
    platform: Platform,
    make: EngineMaker,
    offload: CopyPlan,
    undo: contextlib.ExitStack,
) -> PageDigests:
    """Return digests that read the device back through pinned memory of one page, as `offload` moves one."""
    group = device.layout.group
    scratch = np.zeros(group.page_pitch_bytes, dtype=np.uint8)
    order = HostOrder(arena.layout.name)
    raw = undo.enter_context(HostArena(group, num_pages=1, order=order, allocate=platform.allocate_host))
    pinned = undo.enter_context(PinnedArena(raw, platform))
    plan = CopyPlan.make(device.layout, raw.layout)
    gather = make(offload.choice_for(1).engine, Between(plan, device.buffers, pinned, platform, loads=False), 1)
    blocks_of_page = page_as_blocks(arena)
    overlay = BoundPlan(CopyPlan.make(blocks_of_page, blocks_of_page), (raw.region,), (region_of(scratch),))
    first_page = np.zeros(1, dtype=np.int64)

    def read_back(blocks: IdArray, places: IdArray) -> None:
        if not len(blocks):
            return
        whole = np.full(gather.between.ids_per_page, blocks[0])
        whole[places if len(places) == len(blocks) else slice(None)] = blocks
        marks, _ = gather.start(first_page, whole, None)
        marks[-1][1].wait()
        overlay.copy(places, places)

    return PageDigests(device.layout, arena, scratch, read_back)
