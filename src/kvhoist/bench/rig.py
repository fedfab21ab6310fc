"""What the benchmarks of copies stand on: a device cache, pinned host pages, and engines between them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from types import TracebackType

import numpy as np

from kvhoist.bench.blobs import NAME as BLOBS
from kvhoist.bench.blobs import Blobs
from kvhoist.bench.device_cache import device_cache
from kvhoist.copy.choose import choose_engines
from kvhoist.copy.engine import Between, CopyEngine, Started
from kvhoist.copy.engines import EngineMaker
from kvhoist.copy.plan import CopyPlan, EngineChoice
from kvhoist.copy.reference import BoundPlan
from kvhoist.errors import ConfigError, KvhoistError
from kvhoist.geometry import CacheGroup
from kvhoist.memory.arena import HostArena
from kvhoist.memory.pinned import PinnedArena, touch_threads
from kvhoist.platform.base import Event, IdArray, Platform, Stream

STAGING_BYTES = 256 << 20


class Rig:
    """`num_pages` pages on a device, layer-first, with an allocation a layer and component or (`one_allocation`) one a
    component; and as many in pinned host memory, registered in one piece. Half of each, scattered, are meant to be
    copied. `block_quota` as of `EngineMaker`. A context manager."""

    def __init__(
        self,
        platform: Platform,
        group: CacheGroup,
        *,
        num_pages: int,
        staging_bytes: int = STAGING_BYTES,
        one_allocation: bool = False,
        block_quota: int | None = None,
    ) -> None:
        rng = np.random.default_rng(0)
        self.platform = platform
        self._staging_bytes = staging_bytes
        self.group = group
        self.cache = device_cache(platform, group, num_pages, one_allocation=one_allocation)
        self.arena = HostArena(group, num_pages=num_pages, first_touch_threads=touch_threads(platform))
        with contextlib.ExitStack() as undo:
            self.host = undo.enter_context(PinnedArena(self.arena, platform, piece_bytes=self.arena.num_bytes))
            self._make = undo.enter_context(EngineMaker(platform, self.arena, staging_bytes, block_quota))
            self._undo = undo.pop_all()
        self._engines: list[CopyEngine] = []
        self.pages = rng.permutation(num_pages).astype(np.int64)
        self.blocks = rng.permutation(self.cache.num_blocks).astype(np.int64)
        self._rng = rng

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._engines:
            self._engines.pop().synchronize()
        self._undo.close()

    def engine(self, name: str, *, loads: bool, num_groups: int = 1) -> CopyEngine:
        """Return a copy engine of one direction, ready to start: kvhoist's, or what `module:function` returns for
        a `Between`, another's engine on the same buffers. `BLOBS` moves no page to its place. Raises ConfigError where
        there is no such function."""
        between = Between(self._plan(loads=loads), self.cache.buffers, self.host, self.platform, loads)
        made: CopyEngine
        if ":" in name:
            made = _outside(name)(between)
        elif name == BLOBS:
            made = Blobs(between, len(self.pages))
        else:
            made = _Reference(between) if name == "reference" else self._make(name, between, num_groups)
        self._engines.append(made)
        return made

    def choice(self, num_pages: int, *, loads: bool) -> EngineChoice:
        """Return what `auto` chooses for copies of so many pages."""
        plan = self._plan(loads=loads)
        choices = choose_engines(
            plan, self.platform, loads=loads, staging_bytes=self._staging_bytes, device=self.cache.buffers
        )
        return plan.with_choices(choices).choice_for(num_pages)

    def _plan(self, *, loads: bool) -> CopyPlan:
        ends = (self.cache.layout, self.arena.layout)
        return CopyPlan.make(*(reversed(ends) if loads else ends))

    def picked(self, num_pages: int) -> tuple[IdArray, IdArray]:
        """Return scattered host pages and device blocks for a copy of so many pages."""
        return self.pages[:num_pages], self.blocks[: num_pages * self.group.blocks_per_page]

    def check(self, offload: CopyEngine, load: CopyEngine) -> None:
        """Load random pages, offload them to other host pages, and compare. Raises KvhoistError for wrong bytes."""
        half = len(self.pages) // 2
        pages, blocks = self.picked(half)
        others = self.pages[half : 2 * half]
        for page in pages:
            blob = np.frombuffer(self.arena.page(int(page)), dtype=np.uint8)
            blob[:] = self._rng.integers(0, 256, len(blob), dtype=np.uint8)
        load.start(pages, blocks, None).marks[-1][1].wait()
        offload.start(others, blocks, None).marks[-1][1].wait()
        pairs = zip(pages.tolist(), others.tolist(), strict=True)
        wrong = [page for page, other in pairs if bytes(self.arena.page(page)) != bytes(self.arena.page(other))]
        if wrong:
            raise KvhoistError("pages came back from the device with other bytes", got=f"host pages {wrong[:8]}")


def _outside(name: str) -> Callable[[Between], CopyEngine]:
    module, _, function = name.partition(":")
    try:
        found: Callable[[Between], CopyEngine] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "there is no such engine to measure", got=f"{name!r}: {error}", expected="module:function on Python's path"
        ) from error
    return found


class _Reference:
    """The numpy engine as one of a device's: done when it has started."""

    def __init__(self, between: Between) -> None:
        self.between = between
        self.streams: tuple[Stream, ...] = ()
        host = (between.host.region,)
        ends = (host, between.device) if between.loads else (between.device, host)
        self._bound = BoundPlan(between.plan, *ends)

    def start(self, pages: IdArray, blocks: IdArray, after: Event | None) -> Started:
        self._bound.copy(*((pages, blocks) if self.between.loads else (blocks, pages)))
        event = self.between.platform.make_event()
        return Started([(len(self.between.plan.layers), event)], event)

    def synchronize(self) -> None:
        return
