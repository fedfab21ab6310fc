"""The staged copy engine: whole page blobs over the link, relayout on the device, pipelined through a staging ring."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np

from kvhoist.copy.code_cache import CodeCache
from kvhoist.copy.id_buffers import IdBuffer, IdBuffers
from kvhoist.copy.jit import compile_kernels
from kvhoist.copy.nests import End, Nest
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.relayout import DEFINES, NAME, SOURCE, Relayout, pack_places, word_bytes_of
from kvhoist.copy.ring import CHUNKS, StagingRing
from kvhoist.errors import ConfigError, DeviceError
from kvhoist.layout import Unit
from kvhoist.memory.arena import HostArena
from kvhoist.platform.base import Event, IdArray, MemoryRegion, Module, Platform, Priority, Stream
from kvhoist.units import format_bytes, round_up

_PITCH_ALIGNMENT = 256
_FIRST_CHUNK_BYTES = 8 << 20
_MAX_BLOCKS = 264
"""Two blocks of 256 threads a multiprocessor of an H200: enough for 2.5 TB/s, and short-lived beside other kernels."""


class Staging:
    """What the staged copies of a rank share: the ring, the kernels, the buffers for ids. A context manager, whose end
    unregisters host memory; nothing may be under way then."""

    def __init__(self, platform: Platform, arena: HostArena, staging_bytes: int) -> None:
        """Take up to `staging_bytes` of device memory, less where the arena is small. Raises DeviceError for what the
        device does not have, and as `compile_kernels` does."""
        capability = platform.capabilities.compute_capability
        assert capability is not None, "the staged engine is for CUDA so far"
        kernels = compile_kernels(
            SOURCE.read_text(), name=NAME, compute_capability=capability, defines=DEFINES, cache=CodeCache(None)
        )
        self.platform = platform
        self.module = platform.load_module(kernels.image)
        num_bytes = min(staging_bytes, CHUNKS * arena.num_bytes)
        try:
            region = platform.allocate(num_bytes)
        except DeviceError as error:
            raise DeviceError(
                f"the staging ring of {format_bytes(num_bytes)} does not fit on {platform.device}",
                got=str(error),
                remedy="Lower staging_bytes, or leave the engine less of the device's memory.",
            ) from error
        self.ring = StagingRing(region, platform)
        self.ids = IdBuffers(platform.allocate, platform.register)

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ids.close()


@dataclass(frozen=True, slots=True)
class _Streams:
    """`link` moves blobs between host and ring, `relayout` runs kernels between ring and cache."""

    link: Stream
    relayout: Stream


@dataclass(frozen=True, slots=True)
class _Slice:
    """Consecutive layers of a page: `num_bytes` from `first_byte` of the host blob on, `pitch_bytes` apart staged."""

    num_layers: int
    first_byte: int
    num_bytes: int
    pitch_bytes: int
    relayout: Relayout


class StagedCopy:
    """One direction of one plan between a host arena and a device cache. For one thread at a time."""

    def __init__(
        self,
        plan: CopyPlan,
        device: Sequence[MemoryRegion],
        host: MemoryRegion,
        staging: Staging,
        priority: Priority,
        *,
        loads: bool,
        num_groups: int = 1,
    ) -> None:
        """`host` is pinned. Layer groups of a load can be awaited one after the other. Raises ConfigError for rows that
        the kernel cannot move, a page that the ring cannot pass, or groups that are no run of the host page."""
        self.plan = plan
        self._platform = staging.platform
        self._ring = staging.ring
        self._ids = staging.ids
        self._streams = _Streams(self._platform.make_stream(priority), self._platform.make_stream(priority))
        self._loads = loads
        self._unprepared: tuple[IdBuffer, int, Event | None] | None = None
        self._host = host
        self._device = tuple(device)
        host_side, device_side = (plan.src, plan.dst) if loads else (plan.dst, plan.src)
        self._page_pitch_bytes = host_side.components[0].unit_stride_bytes
        self.ids_per_page = plan.src.group.blocks_per_page if device_side.unit is Unit.BLOCK else 1
        self._slices = [self._slice(part, staging.module) for part in plan.layer_groups(num_groups)]

    def synchronize(self) -> None:
        """Block until all that was enqueued is done."""
        self._streams.link.synchronize()
        self._streams.relayout.synchronize()

    def start(self, pages: IdArray, blocks: IdArray, after: Event | None) -> tuple[list[tuple[int, Event]], Event]:
        """Enqueue the copy of host `pages` and device `blocks` behind `after`. Return, for each layer group in order,
        the number of layers in place so far and the event at its end; and the event after which nothing is read from
        the source any more. Where it raises nothing is under way."""
        streams = self._streams
        with self._platform.current():
            buffer = self._ids.take(blocks)
            self._unprepared = (buffer, blocks.nbytes, after)
            try:
                marks = self._enqueue(pages, buffer.device.address)
                read = self._platform.record(streams.link if self._loads else streams.relayout)
            except BaseException:
                with contextlib.suppress(DeviceError):
                    self.synchronize()
                self._ids.give_back(buffer, None)
                raise
            self._ids.give_back(buffer, marks[-1][1])
        return marks, read

    def _prepare(self) -> None:
        """Before the first relayout, and in a load after the first blobs are on their way: bring the ids to the device,
        and wait for what the copy must come after."""
        if self._unprepared is None:
            return
        (buffer, num_bytes, after), self._unprepared = self._unprepared, None
        self._platform.copy(buffer.host_address, buffer.device.address, num_bytes, self._streams.relayout)
        if after is not None:
            self._streams.relayout.wait(after)

    def _enqueue(self, pages: IdArray, ids: int) -> list[tuple[int, Event]]:
        marks: list[tuple[int, Event]] = []
        done = 0
        host = pages * self._page_pitch_bytes + self._host.address
        last = self._streams.relayout if self._loads else self._streams.link
        for part in self._slices:
            lengths = np.full(len(pages), part.num_bytes, dtype=np.int64)
            staged = np.arange(len(pages), dtype=np.int64) * part.pitch_bytes
            blobs = host + part.first_byte
            for first, stop in self._chunks(part, len(pages)):
                here = ids + 8 * self.ids_per_page * first
                self._chunk(part, blobs[first:stop], staged[: stop - first], lengths[first:stop], here)
            done += part.num_layers
            marks.append((done, self._platform.record(last)))
        return marks

    def _chunks(self, part: _Slice, num_pages: int) -> list[tuple[int, int]]:
        """Cut pages into chunks: small ones first, so that the link starts early, and last, so that it ends late."""
        most = max(1, self._ring.max_chunk_bytes // part.pitch_bytes)
        small = max(1, _FIRST_CHUNK_BYTES // part.pitch_bytes)
        ramp: list[int] = []
        while small < most and 2 * (sum(ramp) + small) < num_pages:
            ramp.append(small)
            small *= 4
        left = num_pages - 2 * sum(ramp)
        count = -(-left // most)
        middle = [left * (i + 1) // count - left * i // count for i in range(count)]
        stops = list(itertools.accumulate([*ramp, *middle, *reversed(ramp)]))
        return list(zip([0, *stops], stops, strict=False))

    def _chunk(self, part: _Slice, host: IdArray, staged: IdArray, lengths: IdArray, ids: int) -> None:
        link, relayout = self._streams.link, self._streams.relayout
        num_steps = len(host) * self.plan.steps_per_page
        num_bytes = len(host) * part.pitch_bytes
        with self._ring as ring:
            if self._loads:
                chunk = ring.take(num_bytes, link)
                self._platform.copy_batch(host, staged + chunk.address, lengths, link)
                link.record(chunk.filled)
                self._prepare()
                relayout.wait(chunk.filled)
                part.relayout.launch(chunk.address, ids, num_steps, relayout)
                ring.give_back(chunk, relayout)
            else:
                chunk = ring.take(num_bytes, relayout)
                self._prepare()
                part.relayout.launch(chunk.address, ids, num_steps, relayout)
                relayout.record(chunk.filled)
                link.wait(chunk.filled)
                self._platform.copy_batch(staged + chunk.address, host, lengths, link)
                ring.give_back(chunk, link)

    def _slice(self, plan: CopyPlan, module: Module) -> _Slice:
        ends = [nest.src if self._loads else nest.dst for nest in plan.nests]
        first = min(end.offset_bytes for end in ends)
        stop = max(end.offset_bytes + self._reach(nest) for end, nest in zip(ends, plan.nests, strict=True))
        if stop - first != plan.page_bytes:
            raise ConfigError(
                "a layer group is not one run of the host page",
                got=f"{plan.page_bytes} bytes spread over {stop - first}",
                expected="host pages in page_first_direct order, or one group of all layers",
            )
        whole = plan.page_bytes == self.plan.page_bytes
        pitch = self._page_pitch_bytes if whole else round_up(stop - first, _PITCH_ALIGNMENT)
        if pitch > self._ring.max_chunk_bytes:
            raise ConfigError(
                "a page is larger than what the staging ring passes at once",
                got=format_bytes(pitch),
                expected=f"at most {format_bytes(self._ring.max_chunk_bytes)}, a quarter of it",
                remedy="Raise staging_bytes, or use smaller pages.",
            )
        nests = [self._placed(nest, first, pitch) for nest in plan.nests]
        word = word_bytes_of(nests)
        if word is None:
            raise ConfigError(
                "the staged engine cannot move these rows",
                got=f"runs aligned to {plan.alignment_bytes} B",
                expected="multiples of 4 bytes",
                remedy="Set io_backend to 'dma'.",
            )
        table = pack_places(nests)
        places = self._platform.allocate(table.nbytes)
        self._platform.write(places, table.view(np.uint8).reshape(-1))
        relayout = Relayout(
            nests,
            module,
            places,
            word_bytes=word,
            scatters=self._loads,
            steps_per_page=plan.steps_per_page,
            steps_per_id=plan.steps_per_page // self.ids_per_page,
            max_blocks=_MAX_BLOCKS,
        )
        return _Slice(len(plan.layers), first, stop - first, pitch, relayout)

    def _reach(self, nest: Nest) -> int:
        """Return the bytes from a nest's first to its last on the host's side, over all steps of a page."""
        host = nest.src if self._loads else nest.dst
        axes = sum((axis.length - 1) * axis[1 if self._loads else 2] for axis in nest.axes)
        return axes + (self.plan.steps_per_page - 1) * host.block_stride_bytes + nest.run_bytes

    def _placed(self, nest: Nest, first: int, pitch: int) -> Nest:
        host, cache = (nest.src, nest.dst) if self._loads else (nest.dst, nest.src)
        staged = End(0, host.offset_bytes - first, pitch, host.block_stride_bytes)
        placed = replace(cache, buffer=0, offset_bytes=cache.offset_bytes + self._device[cache.buffer].address)
        src, dst = (staged, placed) if self._loads else (placed, staged)
        return Nest(src, dst, nest.run_bytes, nest.axes)
