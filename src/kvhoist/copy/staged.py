"""The staged copy engine: whole page blobs over the link, relayout on the device, pipelined through a staging ring."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np

from kvhoist.copy.device_kernels import DeviceKernels
from kvhoist.copy.engine import Between, Started, whole_or_nothing
from kvhoist.copy.id_buffers import IdBuffer
from kvhoist.copy.nests import Nest
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.relayout import Relayout, word_bytes_of
from kvhoist.copy.ring import CHUNKS, StagingRing
from kvhoist.errors import ConfigError, DeviceError
from kvhoist.memory.arena import HostArena
from kvhoist.platform.base import Event, IdArray, Module, Platform, Stream
from kvhoist.units import format_bytes, round_up

_PITCH_ALIGNMENT = 256
_SMALL_CHUNK_BYTES = 4 << 20
"""75 us on the link, in which the CPU enqueues the next chunk, and the device moves the largest."""

_FIRST_PAGES = 8
"""A load's link starts when the first batch is enqueued: so many entries take the CPU 15 us."""

_BLOCK_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 2
"""Enough for 2.5 TB/s on an H200, and short-lived beside other kernels."""


RINGS = 2
"""One a direction: in a shared one a load would wait until the offloads that came before it are almost through, and
the other way round, for chunks are taken in order."""


def make_ring(platform: Platform, arena: HostArena, staging_bytes: int) -> StagingRing:
    """Return one of the rings that share up to `staging_bytes` of device memory, less where the arena is small. Raises
    DeviceError for what the device does not have."""
    num_bytes = min(staging_bytes // RINGS, CHUNKS * arena.num_bytes)
    try:
        region = platform.allocate(num_bytes)
    except DeviceError as error:
        raise DeviceError(
            f"the staging ring of {format_bytes(num_bytes)} does not fit on {platform.device}",
            got=str(error),
            remedy="Lower staging_bytes, or leave the engine less of the device's memory.",
        ) from error
    return StagingRing(region, platform)


@dataclass(frozen=True, slots=True)
class _Slice:
    """Consecutive layers of a page: `num_bytes` from `first_byte` of the host blob on, `pitch_bytes` apart staged."""

    num_layers: int
    first_byte: int
    pitch_bytes: int
    staged: IdArray  # where the pages of the largest chunk begin
    lengths: IdArray  # num_bytes each
    relayout: Relayout


class StagedCopy:
    """One direction between a host arena and a device cache: `link` moves blobs between host and ring, `relayout` runs
    kernels between ring and cache. For one thread at a time."""

    def __init__(self, between: Between, kernels: DeviceKernels, ring: StagingRing, *, num_groups: int = 1) -> None:
        """Layer groups of a load can be awaited one after the other. Raises ConfigError for rows that the kernel cannot
        move, a page that the ring cannot pass, or groups that are no run of the host page."""
        self.between = between
        self._platform = platform = between.platform
        self._ring = ring
        self._ids = kernels.ids
        self._link, self._relayout = platform.make_stream(between.priority), platform.make_stream(between.priority)
        self.streams: tuple[Stream, ...] = (self._link, self._relayout)
        self._loads = between.loads
        self._unprepared: tuple[IdBuffer, int, Event | None] | None = None
        self._slices = [self._slice(part, kernels.module) for part in between.plan.layer_groups(num_groups)]

    def synchronize(self) -> None:
        """Block until all that was enqueued is done."""
        for stream in self.streams:
            stream.synchronize()

    def start(self, pages: IdArray, blocks: IdArray, after: Event | None) -> Started:
        """Enqueue the copy of host `pages` and device `blocks` behind `after`. Where it raises nothing is under way."""
        marks: list[tuple[int, Event]] = []
        with self._platform.current(), self._ids.lent(blocks, marks) as buffer, self._ring, whole_or_nothing(self):
            self._unprepared = (buffer, len(blocks), after)
            self._enqueue(pages, buffer.device.address, marks)
            read = self._platform.record(self._link if self._loads else self._relayout)
        return Started(marks, read)

    def _prepare(self) -> None:
        """Before the first relayout, and in a load after the first blobs are on their way: bring the ids to the device,
        and wait for what the copy must come after."""
        if self._unprepared is None:
            return
        (buffer, num_ids, after), self._unprepared = self._unprepared, None
        buffer.bring(num_ids, self._relayout)
        if after is not None:
            self._relayout.wait(after)

    def _enqueue(self, pages: IdArray, ids: int, marks: list[tuple[int, Event]]) -> None:
        done = 0
        host = pages * self.between.page_pitch_bytes + self.between.host.region.address
        id_bytes = 8 * self.between.ids_per_page
        last = self._relayout if self._loads else self._link
        for i, part in enumerate(self._slices):
            blobs = host + part.first_byte
            head, tail = self._ends(part, starts=i == 0, ends=i == len(self._slices) - 1)
            for first, stop in _cut(len(pages), len(part.staged), head, tail):
                self._chunk(part, blobs[first:stop], ids + id_bytes * first)
            done += part.num_layers
            marks.append((done, self._platform.record(last)))

    def _ends(self, part: _Slice, *, starts: bool, ends: bool) -> tuple[int, int]:
        """Return the pages of a small first chunk where a copy `starts`, so that the link starts early; and of a small
        last one where a load `ends`: the less is left to do when the link is done."""
        small = max(1, _SMALL_CHUNK_BYTES // part.pitch_bytes)
        head = max(small, _FIRST_PAGES) if self._loads else small
        return head if starts else 0, small if ends and self._loads else 0

    def _chunk(self, part: _Slice, host: IdArray, ids: int) -> None:
        link, relayout, ring = self._link, self._relayout, self._ring
        num_pages = len(host)
        num_steps = num_pages * self.between.plan.steps_per_page
        chunk = ring.take(num_pages * part.pitch_bytes, link if self._loads else relayout)
        staged, lengths = part.staged[:num_pages] + chunk.address, part.lengths[:num_pages]
        if self._loads:
            self._platform.copy_batch(host, staged, lengths, link)
            link.record(chunk.filled)
            self._prepare()
            relayout.wait(chunk.filled)
            part.relayout.launch(chunk.address, 0, ids, num_steps, relayout)
            ring.give_back(chunk, relayout)
        else:
            self._prepare()
            part.relayout.launch(chunk.address, 0, ids, num_steps, relayout)
            relayout.record(chunk.filled)
            link.wait(chunk.filled)
            self._platform.copy_batch(staged, host, lengths, link)
            ring.give_back(chunk, link)

    def _slice(self, plan: CopyPlan, module: Module) -> _Slice:
        ends = [self.between.host_end(nest) for nest in plan.nests]
        first = min(end.offset_bytes for end in ends)
        stop = max(end.offset_bytes + self._reach(nest) for end, nest in zip(ends, plan.nests, strict=True))
        if stop - first != plan.page_bytes:
            raise ConfigError(
                "a layer group is not one run of the host page",
                got=f"{plan.page_bytes} bytes spread over {stop - first}",
                expected="host pages in page_first_direct order, or one group of all layers",
            )
        whole = plan.page_bytes == self.between.plan.page_bytes
        pitch = self.between.page_pitch_bytes if whole else round_up(stop - first, _PITCH_ALIGNMENT)
        if pitch > self._ring.max_chunk_bytes:
            raise ConfigError(
                "a page is larger than what the staging ring passes at once",
                got=format_bytes(pitch),
                expected=f"at most {format_bytes(self._ring.max_chunk_bytes)}, a sixth of staging_bytes",
                remedy="Raise staging_bytes, or use smaller pages.",
            )
        nests = [self._placed(nest, first, pitch) for nest in plan.nests]
        relayout = Relayout(
            nests,
            module,
            self._platform,
            word_bytes=word_bytes_of(nests),
            scatters=self._loads,
            steps_per_page=plan.steps_per_page,
            steps_per_id=plan.steps_per_page // self.between.ids_per_page,
            block_threads=_BLOCK_THREADS,
            max_blocks=_BLOCKS_PER_MULTIPROCESSOR * self._platform.capabilities.multiprocessors,
        )
        staged = np.arange(self._ring.max_chunk_bytes // pitch, dtype=np.int64) * pitch
        return _Slice(len(plan.layers), first, pitch, staged, np.full_like(staged, stop - first), relayout)

    def _reach(self, nest: Nest) -> int:
        """Return the bytes from a nest's first to its last on the host's side, over all steps of a page."""
        host = self.between.host_end(nest)
        axes = sum((axis.length - 1) * axis[1 if self._loads else 2] for axis in nest.axes)
        return axes + (self.between.plan.steps_per_page - 1) * host.block_stride_bytes + nest.run_bytes

    def _placed(self, nest: Nest, first: int, pitch: int) -> Nest:
        host = self.between.host_end(nest)
        staged = replace(host, offset_bytes=host.offset_bytes - first, unit_stride_bytes=pitch)
        return self.between.with_pages(nest, staged)


@functools.lru_cache(maxsize=256)
def _cut(num_pages: int, most: int, head: int, tail: int) -> tuple[tuple[int, int], ...]:
    """Cut pages into chunks of at most `most`, the first of `head` and the last of `tail` where these are not 0 and the
    pages suffice. Returns (first, stop) of each."""
    ends = [head, tail] if head + tail < num_pages and max(head, tail) <= most else [0, 0]
    left = num_pages - sum(ends)
    count = -(-left // most)
    middle = [left * (i + 1) // count - left * i // count for i in range(count)]
    lengths = [length for length in (ends[0], *middle, ends[1]) if length]
    return tuple(itertools.pairwise([0, *itertools.accumulate(lengths)]))
