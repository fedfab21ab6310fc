"""How fast scattered pages move between a GPU's cache and pinned host memory, as a share of one plain memcpy.

Every shape is moved to the device and back first and compared. Then the copy engine, and one pinned memcpy of the same
number of bytes (the link's peak), take turns: medians, by events on an engine's stream and by the wall clock.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from kvhoist.bench.facts import facts
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.staged import StagedCopy, Staging
from kvhoist.device_layout import DeviceCache, read_device_layout
from kvhoist.errors import KvhoistError
from kvhoist.geometry import CacheGeometry, CacheGroup
from kvhoist.memory.arena import HostArena
from kvhoist.memory.pinned import PinnedArena, touch_threads
from kvhoist.platform.base import Device, IdArray, MemoryRegion, Priority
from kvhoist.platform.cuda import CudaPlatform
from kvhoist.platform.cuda_timing import StreamTimer

TARGETS = {"events": 0.97, "wall": 0.93}
TARGETS_FROM_256_MIB = {"events": 0.98, "wall": 0.96}

_PAGE_TOKENS = 64
_NUM_PAGES = 64
_POOL_PAGES = 2 * _NUM_PAGES
_STAGING_BYTES = 256 << 20
_LOAD_GROUPS = (1, 4)


@dataclass(frozen=True, slots=True)
class DeviceShape:
    """A cache to move pages of: K and V rows, or latent ones, in blocks of `block_tokens`."""

    latent: bool
    row_bytes: int
    layers: int
    block_tokens: int = _PAGE_TOKENS

    def __str__(self) -> str:
        blocks = "" if self.block_tokens == _PAGE_TOKENS else f", blocks of {self.block_tokens}"
        return f"{'MLA' if self.latent else 'MHA'} {self.row_bytes} B x {self.layers}{blocks}"

    @property
    def group(self) -> CacheGroup:
        blocks = _PAGE_TOKENS // self.block_tokens
        if self.latent:
            made = CacheGeometry.latent(
                self.layers, row_bytes=self.row_bytes, page_tokens=_PAGE_TOKENS, blocks_per_page=blocks
            )
        else:
            rows = {"k_row_bytes": self.row_bytes, "v_row_bytes": self.row_bytes}
            made = CacheGeometry.attention(self.layers, **rows, page_tokens=_PAGE_TOKENS, blocks_per_page=blocks)
        return made.groups[0]


def shapes(smoke: bool) -> list[DeviceShape]:
    """Return the shapes of the incumbents' tables, whole pages and vLLM's blocks of 16 tokens."""
    if smoke:
        return [DeviceShape(False, 512, 4), DeviceShape(True, 576, 4, 16)]
    whole = [(False, (512, 1024, 2048, 4096)), (True, (512, 576, 1024, 1152, 2048, 4096))]
    found = [DeviceShape(kind, row, n) for kind, rows in whole for row in rows for n in (16, 32, 61, 80)]
    blocks = [(False, 512, 32), (False, 1024, 32), (False, 2048, 32), (True, 576, 61), (True, 1152, 61)]
    return found + [DeviceShape(*shape, 16) for shape in blocks]


def run(device: Device, *, smoke: bool = False, repeats: int = 9) -> dict[str, Any]:
    """Measure every shape on `device` and return plain data. Raises ConfigError where there is no such GPU,
    KvhoistError where a byte is wrong."""
    platform = CudaPlatform(device)
    platform.enter_thread()
    rows = [row for shape in shapes(smoke) for row in _measure(platform, shape, 3 if smoke else repeats)]
    return {
        "bench": "copy",
        "smoke": smoke,
        **facts(device),
        "peak": "one pinned memcpy of the same number of bytes, by events, in the same run",
        "targets": {"below 256 MiB": TARGETS, "from 256 MiB": TARGETS_FROM_256_MIB},
        "staging_bytes": _STAGING_BYTES,
        "results": rows,
        "pass": all(row["pass"] for row in rows),
    }


def _measure(platform: CudaPlatform, shape: DeviceShape, repeats: int) -> list[dict[str, Any]]:
    group = shape.group
    rng = np.random.default_rng(0)
    cache = _device_cache(platform, group)
    pages = rng.permutation(_POOL_PAGES)[:_NUM_PAGES].astype(np.int64)
    blocks = rng.permutation(cache.num_blocks)[: _NUM_PAGES * group.blocks_per_page].astype(np.int64)
    arena = HostArena(group, num_pages=_POOL_PAGES, first_touch_threads=touch_threads(platform))
    with (
        PinnedArena(arena, platform, piece_bytes=arena.num_bytes) as pinned,  # in one piece: the peak is one copy
        Staging(platform, arena, _STAGING_BYTES) as staging,
    ):
        ends = (cache.buffers, pinned.region, staging)
        plan = CopyPlan.make(arena.layout, cache.layout)
        copies = {"offload": StagedCopy(CopyPlan.make(cache.layout, arena.layout), *ends, Priority.NORMAL, loads=False)}
        for n in _LOAD_GROUPS:
            copies[f"load, {n} layer groups"] = StagedCopy(plan, *ends, Priority.HIGH, loads=True, num_groups=n)
        _check(arena, copies["offload"], copies[f"load, {_LOAD_GROUPS[-1]} layer groups"], pages, blocks, rng)
        arms = {name: _Arm(platform, copy, pages, blocks) for name, copy in copies.items()}
        peak = _Peak(platform, pinned.region, _NUM_PAGES * group.page_bytes)
        times: dict[str, list[_Times]] = {name: [] for name in arms}
        for repeat in range(repeats + 2):  # the first two warm up
            for name, arm in arms.items():
                taken = _Times(*arm.once(), peak.once(upwards=name != "offload"))
                times[name] += [taken] if repeat >= 2 else []
        for copy in copies.values():
            copy.synchronize()
    return [_row(shape, name, peak.num_bytes, found) for name, found in times.items()]


class _Times(NamedTuple):
    """Seconds of one copy: by events, by the wall clock, to submit; and of the peak beside it."""

    events: float
    wall: float
    submit: float
    peak: float


class _Arm:
    """One copy, timed from an engine's point of view."""

    def __init__(self, platform: CudaPlatform, copy: StagedCopy, pages: IdArray, blocks: IdArray) -> None:
        self._platform, self._copy, self._pages, self._blocks = platform, copy, pages, blocks
        self._engine = platform.make_stream()
        self._timer = StreamTimer(platform)

    def once(self) -> tuple[float, float, float]:
        began = time.perf_counter()
        self._timer.start(self._engine)
        marks, _ = self._copy.start(self._pages, self._blocks, self._platform.record(self._engine))
        submitted = time.perf_counter()
        self._engine.wait(marks[-1][1])
        self._timer.stop(self._engine)
        events = self._timer.seconds()
        return events, time.perf_counter() - began, submitted - began


class _Peak:
    """One pinned memcpy of `num_bytes`, the link's peak."""

    def __init__(self, platform: CudaPlatform, host: MemoryRegion, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._platform, self._host = platform, host
        self._flat = platform.allocate(num_bytes)
        self._stream = platform.make_stream(Priority.HIGH)
        self._timer = StreamTimer(platform)

    def once(self, *, upwards: bool) -> float:
        host, flat = self._host.address, self._flat.address
        source, destination = (host, flat) if upwards else (flat, host)
        self._timer.start(self._stream)
        self._platform.copy(source, destination, self.num_bytes, self._stream)
        self._timer.stop(self._stream)
        return self._timer.seconds()


def _row(shape: DeviceShape, arm: str, num_bytes: int, times: list[_Times]) -> dict[str, Any]:
    median = _Times(*(statistics.median(found) for found in zip(*times, strict=True)))
    targets = TARGETS if num_bytes < 256 << 20 else TARGETS_FROM_256_MIB
    shares = {"events": median.peak / median.events, "wall": median.peak / median.wall}
    return {
        "shape": str(shape),
        "arm": arm,
        "mib": num_bytes >> 20,
        "peak_gib_s": round(num_bytes / median.peak / (1 << 30), 2),
        "gib_s": round(num_bytes / median.events / (1 << 30), 2),
        "share_by_events": round(shares["events"], 3),
        "share_by_wall": round(shares["wall"], 3),
        "submit_us": round(median.submit * 1e6, 1),
        "pass": all(shares[name] >= target for name, target in targets.items()),
    }


def _check(
    arena: HostArena, offload: StagedCopy, load: StagedCopy, pages: IdArray, blocks: IdArray, rng: np.random.Generator
) -> None:
    """Load random pages, offload them to other host pages, and compare."""
    others = np.setdiff1d(np.arange(arena.num_pages), pages)[: len(pages)]
    for page in pages:
        blob = np.frombuffer(arena.page(int(page)), dtype=np.uint8)
        blob[:] = rng.integers(0, 256, len(blob), dtype=np.uint8)
    load.start(pages, blocks, None)[0][-1][1].wait()
    offload.start(others, blocks, None)[0][-1][1].wait()
    pairs = zip(pages.tolist(), others.tolist(), strict=True)
    wrong = [page for page, other in pairs if bytes(arena.page(page)) != bytes(arena.page(other))]
    if wrong:
        raise KvhoistError("pages came back from the device with other bytes", got=f"host pages {wrong[:8]}")


def _device_cache(platform: CudaPlatform, group: CacheGroup) -> DeviceCache:
    """Return a layer-first cache: [blocks, tokens, row bytes] a layer and component, each an allocation of its own."""
    blocks = _POOL_PAGES * group.blocks_per_page
    tensors = {
        c.name: [_DeviceTensor(platform, (blocks, group.block_tokens, c.row_bytes)) for _ in c.layers]
        for c in group.components
    }
    return read_device_layout(group, tensors, "block token dim")


class _DeviceTensor:
    """Device memory as far as `read_device_layout` looks at tensors."""

    dtype = "uint8"

    def __init__(self, platform: CudaPlatform, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._region: MemoryRegion = platform.allocate(int(np.prod(shape)))
        self.device = SimpleNamespace(type=platform.device.type, index=platform.device.index)

    def data_ptr(self) -> int:
        return self._region.address

    def nbytes(self) -> int:
        return self._region.num_bytes

    def stride(self) -> tuple[int, ...]:
        return (self.shape[1] * self.shape[2], self.shape[2], 1)

    def element_size(self) -> int:
        return 1

    def untyped_storage(self) -> _DeviceTensor:
        return self
