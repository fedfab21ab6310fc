"""The two copies of one rank, device to host and back, bound to its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from kvhoist.copy.choose import choose_engines
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.reference import BoundPlan
from kvhoist.device_layout import DeviceCache
from kvhoist.memory.arena import HostArena
from kvhoist.messages import Job
from kvhoist.platform.base import Event, IdArray, Platform
from kvhoist.transfer import Transfer
from kvhoist.verify import PageDigests

_MAX_LOAD_STEPS = 8
"""Layer groups of a load: enough for a prefill to start early, few enough that each is many pages' worth of bytes."""


class Copied(NamedTuple):
    """Bytes that a copy moved, the indices of pages that failed, and why."""

    num_bytes: int
    failed_pages: tuple[int, ...] = ()
    error: str | None = None


MISMATCH = "debug_verify: the device does not hold what was offloaded"

Finish = Callable[[], Copied]
"""Blocks until the last byte of a copy that was begun."""


def failed_with(problem: BaseException) -> Finish:
    """Return the end of a copy that could not begin: it raises `problem`."""

    def finish() -> Copied:
        raise problem

    return finish


class Copies(Protocol):
    """Plans of both directions with their engines chosen. Loads and offloads may be begun at once, each in one thread;
    jobs that touch the same bytes are the control plane's to order."""

    plans: tuple[CopyPlan, CopyPlan]

    def offload(self, job: Job, after: Event | None, transfer: Transfer) -> Finish:
        """Begin to copy the job's blocks to its host pages, behind `after`."""
        ...

    def load(self, job: Job, after: Event | None, transfer: Transfer) -> Finish:
        """Begin to copy the job's host pages to its blocks (none to one that is LEFT_OUT), behind `after`, and tell
        `transfer` which layers arrive when. With `debug_verify` pages arrive as a whole."""
        ...

    def arrived(self, host_pages: Sequence[int]) -> None:
        """Take note of what host pages hold now."""
        ...

    def close(self) -> None:
        """Give back what belongs to copies alone. Nothing may be under way."""
        ...


def plans_between(
    device: DeviceCache, arena: HostArena, platform: Platform, io_backend: str, staging_bytes: int
) -> tuple[CopyPlan, CopyPlan]:
    """Return the plans of offloads and loads, with engines chosen. Raises ConfigError as `choose_engines` does."""
    choose = partial(choose_engines, staging_bytes=staging_bytes, device=device.buffers)
    offload, load = CopyPlan.make(device.layout, arena.layout), CopyPlan.make(arena.layout, device.layout)
    return (
        offload.with_choices(choose(offload, platform, io_backend, loads=False)),
        load.with_choices(choose(load, platform, io_backend, loads=True)),
    )


def ids_of(numbers: Sequence[int]) -> IdArray:
    return np.asarray(numbers, dtype=np.int64)


class HostCopies:
    """Copies by the reference engine, where the CPU can address the device's memory: done when they have begun, hence
    begun when `after` has happened."""

    def __init__(
        self, device: DeviceCache, arena: HostArena, platform: Platform, io_backend: str, *, debug_verify: bool
    ) -> None:
        offload, load = self.plans = plans_between(device, arena, platform, io_backend, 0)
        host = (arena.region,)
        self._offload = BoundPlan(offload, device.buffers, host)
        self._load = [BoundPlan(step, host, device.buffers) for step in load.layer_groups(_MAX_LOAD_STEPS)]
        self._digests = PageDigests.of_host(device, arena) if debug_verify else None

    def offload(self, job: Job, after: Event | None, transfer: Transfer) -> Finish:
        num_bytes = self._offload.copy(ids_of(job.device_blocks), ids_of(job.host_pages))
        self.arrived(job.host_pages)
        return lambda: Copied(num_bytes)

    def load(self, job: Job, after: Event | None, transfer: Transfer) -> Finish:
        pages, blocks = ids_of(job.host_pages), ids_of(job.device_blocks)
        num_layers = num_bytes = 0
        for step in self._load:
            num_bytes += step.copy(pages, blocks)
            num_layers += len(step.plan.layers)
            if self._digests is None:
                transfer.arrive(num_layers)
        wrong = self._digests.mismatches(job.host_pages, blocks) if self._digests else ()
        return lambda: Copied(num_bytes, wrong, MISMATCH if wrong else None)

    def arrived(self, host_pages: Sequence[int]) -> None:
        if self._digests:
            self._digests.remember(host_pages)

    def close(self) -> None:
        return
