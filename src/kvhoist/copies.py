"""The two copies of one rank, device to host and back, bound to its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvhoist.copy.choose import choose_engine
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.reference import BoundPlan
from kvhoist.device_layout import DeviceCache
from kvhoist.memory.arena import HostArena
from kvhoist.messages import Job
from kvhoist.platform.base import IdArray, Platform
from kvhoist.verify import PageDigests

_MAX_LOAD_STEPS = 8
"""Layer groups of a load: enough for a prefill to start early, few enough that each is many pages' worth of bytes."""


class Copies:
    """Plans of both directions with their engines chosen, and `debug_verify`'s digests. Loads and offloads may run at
    once, each in one thread; jobs that touch the same bytes are the control plane's to order."""

    def __init__(
        self, device: DeviceCache, arena: HostArena, platform: Platform, io_backend: str, *, debug_verify: bool
    ) -> None:
        offload, load = (
            plan.with_choice(choose_engine(plan, platform, io_backend))
            for plan in (CopyPlan.make(device.layout, arena.layout), CopyPlan.make(arena.layout, device.layout))
        )
        host = (arena.region,)
        self.plans = (offload, load)
        self._offload = BoundPlan(offload, device.buffers, host)
        self._load = [BoundPlan(step, host, device.buffers) for step in load.layer_groups(_MAX_LOAD_STEPS)]
        self._digests = PageDigests(device, arena) if debug_verify else None

    def offload(self, job: Job) -> int:
        """Copy the job's blocks to its host pages and return the bytes moved. Blocks until the last byte."""
        num_bytes = self._offload.copy(_ids(job.device_blocks), _ids(job.host_pages))
        self.arrived(job.host_pages)
        return num_bytes

    def load(self, job: Job, arrive: Callable[[int], None]) -> tuple[int, tuple[int, ...]]:
        """Copy the job's host pages to its blocks (none to one that is LEFT_OUT), calling `arrive(number of layers in
        place)` as they come. Return the bytes moved and the indices of pages that `debug_verify` refuses (which only
        arrive as a whole then)."""
        pages, blocks = _ids(job.host_pages), _ids(job.device_blocks)
        num_layers = num_bytes = 0
        for step in self._load:
            num_bytes += step.copy(pages, blocks)
            num_layers += len(step.plan.layers)
            if self._digests is None:
                arrive(num_layers)
        return num_bytes, self._digests.mismatches(job.host_pages, blocks) if self._digests else ()

    def arrived(self, host_pages: Sequence[int]) -> None:
        """Take note of what host pages hold now."""
        if self._digests:
            self._digests.remember(host_pages)


def _ids(numbers: Sequence[int]) -> IdArray:
    return np.asarray(numbers, dtype=np.int64)
