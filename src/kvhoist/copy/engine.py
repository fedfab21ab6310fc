"""What every copy engine between a host arena and a device cache has in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from kvhoist.copy.nests import End, Nest
from kvhoist.copy.plan import CopyPlan
from kvhoist.errors import DeviceError
from kvhoist.layout import Layout, Unit
from kvhoist.memory.pinned import PinnedArena
from kvhoist.platform.base import Event, IdArray, MemoryRegion, Platform, Priority, Stream


@dataclass(frozen=True, slots=True)
class Between:
    """One direction of a plan, between pinned host pages and the buffers of a device cache."""

    plan: CopyPlan
    device: tuple[MemoryRegion, ...]
    host: PinnedArena
    platform: Platform
    loads: bool

    @property
    def priority(self) -> Priority:
        return Priority.HIGH if self.loads else Priority.NORMAL

    @property
    def host_layout(self) -> Layout:
        return self.plan.src if self.loads else self.plan.dst

    @property
    def device_layout(self) -> Layout:
        return self.plan.dst if self.loads else self.plan.src

    @property
    def page_pitch_bytes(self) -> int:
        """Bytes from one host page to the next."""
        return self.host_layout.components[0].unit_stride_bytes

    @property
    def ids_per_page(self) -> int:
        """How many device ids name a page."""
        return self.plan.src.group.blocks_per_page if self.device_layout.unit is Unit.BLOCK else 1

    def host_end(self, nest: Nest) -> End:
        """Return the host's side of one of the plan's nests."""
        return nest.src if self.loads else nest.dst

    def with_pages(self, nest: Nest, pages: End) -> Nest:
        """Return the nest with `pages` for the host's side, and with addresses on the cache's."""
        cache = nest.dst if self.loads else nest.src
        address = cache.offset_bytes + self.device[cache.buffer].address
        moved = replace(cache, buffer=0, offset_bytes=address)
        src, dst = (pages, moved) if self.loads else (moved, pages)
        return Nest(src, dst, nest.run_bytes, nest.axes)


class Started(NamedTuple):
    """A copy in the device's queues: for each layer group in order the number of layers in place so far and the event
    at its end; and the event after which nothing is read from the source any more."""

    marks: list[tuple[int, Event]]
    read: Event


class CopyEngine(Protocol):
    """Copies of one direction. For one thread at a time."""

    between: Between
    streams: tuple[Stream, ...]

    def start(self, pages: IdArray, blocks: IdArray, after: Event | None) -> Started:
        """Enqueue the copy of host `pages` and device `blocks`, which are checked, behind `after`. Where it raises
        nothing is under way."""
        ...

    def synchronize(self) -> None:
        """Block until all that was enqueued is done."""
        ...


@contextlib.contextmanager
def whole_or_nothing(engine: CopyEngine) -> Iterator[None]:
    """Where the block raises, in the middle of a copy, wait for what it had enqueued: nothing is under way then."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(DeviceError):
            engine.synchronize()
        raise
