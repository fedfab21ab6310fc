"""One rank on a device: a cache of known bytes, a mover, and the same bytes on the CPU as the oracle's ground.

Where the cache's memory comes from is a subclass's: a GPU (gpu_rank) or the simulated one (hip_rank).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.reference import BoundPlan
from kvhoist.device_layout import DeviceCache, read_device_layout
from kvhoist.geometry import CacheGeometry, CacheGroup
from kvhoist.layout import HostOrder
from kvhoist.memory.arena import HostArena
from kvhoist.messages import Completion, Job, JobKind
from kvhoist.mover import Mover
from kvhoist.platform.base import Device, Event
from kvhoist.platform.open import open_platform
from kvhoist.transfer import Transfer

DEADLINE_S = 30
ENGINES = ("staged", "dma", "mapped")
GUARD, GUARD_BYTES = 0xA5, 4096


@dataclass(frozen=True)
class Shape:
    """A kind of cache: its group, its axes, and the shapes of its tensors for a number of blocks."""

    name: str
    group: CacheGroup
    axes: str
    tensors: dict[str, tuple[int, ...]]  # by component, of one layer; -1 stands for the number of blocks (or slots)
    one_tensor: bool = False


def _attention(name: str, bpp: int, k_row: int, v_row: int, axes: str, shape: Any, layers: int = 5) -> Shape:
    group = CacheGeometry.attention(
        layers, k_row_bytes=k_row, v_row_bytes=v_row, page_tokens=16 * bpp, blocks_per_page=bpp
    ).groups[0]
    rows = {"k": k_row, "v": v_row}
    return Shape(name, group, axes, {c.name: shape(rows[c.name]) for c in group.components})


def shapes() -> list[Shape]:
    """Return every kind of cache that the tests move: layouts, component kinds, row lengths, blocks of a page."""
    latent = CacheGeometry.latent(7, row_bytes=576, page_tokens=64, blocks_per_page=4, index_row_bytes=132).groups[0]
    opaque = CacheGeometry.opaque(5, block_bytes=12 * 1024 + 4, block_tokens=16, blocks_per_page=2).groups[0]
    slots = "slot dim"
    return [
        _attention("slots, whole pages", 1, 1024, 1024, slots, lambda row: (-16, row)),
        _attention("blocks of tokens", 4, 512, 512, "block token dim", lambda row: (-1, 16, row)),
        _attention("head-major blocks", 4, 512, 512, "block head token dim", lambda row: (-1, 4, 16, row // 4)),
        _attention("head-major, narrow heads", 2, 96, 96, "block head token dim", lambda row: (-1, 8, 16, row // 8)),
        _attention("K only", 2, 640, 0, "block token dim", lambda row: (-1, 16, row)),
        _attention("K wider than V", 2, 384, 128, "block token dim", lambda row: (-1, 16, row)),
        _attention("rows of 4 bytes", 4, 4, 4, "block token dim", lambda row: (-1, 16, row)),
        Shape("latent and index", latent, "block token dim", {"latent": (-1, 16, 576), "index_k": (-1, 16, 132)}),
        Shape("opaque blocks", opaque, "block ...", {"block": (-1, 12 * 1024 + 4)}),
    ]


SMALL = Shape(
    "small",
    CacheGeometry.attention(3, k_row_bytes=64, v_row_bytes=32, page_tokens=8, blocks_per_page=2).groups[0],
    "block token dim",
    {"k": (-1, 4, 64), "v": (-1, 4, 32)},
)
"""Three layers that may arrive one after the other, in pages of 4 KiB."""


class DeviceRank:
    """Random bytes in a cache of `num_blocks` blocks and an arena of `host_pages` pages; all of both is compared."""

    def __init__(self, shape: Shape, *, num_blocks: int = 64, host_pages: int = 40, order: str = "", **options: Any):
        self.group = shape.group
        self.platform = open_platform(Device("cuda", 0))
        self._axes = shape.axes
        self._guarded: list[Any] = []
        self.tensors = {
            component.name: self._layers(_sized(shape.tensors[component.name], num_blocks), len(component.layers))
            for component in self.group.components
        }
        self.device = self._read()
        self.arena = HostArena(
            self.group,
            num_pages=host_pages,
            order=HostOrder(order or "page_first_direct"),
            allocate=self.platform.allocate_host,
        )
        self.arena.buffer[:] = np.random.default_rng(1).integers(0, 256, self.arena.num_bytes, dtype=np.uint8)
        self.answers: list[Completion] = []
        self.mover = Mover(
            self.group,
            self.device,
            self.arena,
            platform=self.platform,
            on_complete=self.answers.append,
            **options,
        )
        self._next_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.mover.close(timeout_s=DEADLINE_S)

    @property
    def ids_per_page(self) -> int:
        return self.group.blocks_per_page

    def picked(self, count: int, seed: int) -> tuple[list[int], list[int]]:
        """Return `count` host pages and blocks for them."""
        rng = random.Random(seed)
        pages = rng.sample(range(self.arena.num_pages), count)
        return pages, rng.sample(range(self.device.layout.num_units), count * self.ids_per_page)

    def snapshot(self) -> dict[str, list[np.ndarray]]:
        """Return the cache's bytes, once it is sure that none around its tensors was touched."""
        raise NotImplementedError

    def _layers(self, shape: tuple[int, ...], num_layers: int) -> list[Any]:
        """Return tensors of random bytes in device memory, with guards before and behind them."""
        raise NotImplementedError

    def _read(self) -> DeviceCache:
        """Return the cache that the tensors are."""
        return read_device_layout(self.group, self.tensors, self._axes)

    def submit(
        self, kind: JobKind, pages: Sequence[int], blocks: Sequence[int], after: Event | None = None
    ) -> Transfer:
        keys = tuple(b"key %d" % page for page in pages)
        job = Job(self._next_id, kind, bytes(32), 0, keys, tuple(pages), tuple(blocks))
        self._next_id += 1
        return self.mover.submit(job, after=after)

    def expected_offload(self, pages: Sequence[int], blocks: Sequence[int]) -> np.ndarray:
        """Return what the arena must hold after an offload, by the oracle."""
        cache = read_device_layout(self.group, self.snapshot(), self._axes)
        wanted = HostArena(self.group, num_pages=self.arena.num_pages, order=HostOrder(self.arena.layout.name))
        wanted.buffer[:] = self.arena.buffer
        plan = CopyPlan.make(cache.layout, wanted.layout)
        BoundPlan(plan, cache.buffers, (wanted.region,)).copy(np.array(blocks), np.array(pages))
        return wanted.buffer

    def expected_load(self, pages: Sequence[int], blocks: Sequence[int]) -> dict[str, list[np.ndarray]]:
        """Return what the tensors must hold after a load, by the oracle."""
        wanted = self.snapshot()
        cache = read_device_layout(self.group, wanted, self._axes)
        plan = CopyPlan.make(self.arena.layout, cache.layout)
        BoundPlan(plan, (self.arena.region,), cache.buffers).copy(np.array(pages), np.array(blocks))
        return wanted


def same(wanted: dict[str, list[np.ndarray]], got: dict[str, list[np.ndarray]]) -> bool:
    return all((a == b).all() for name in wanted for a, b in zip(wanted[name], got[name], strict=True))


def _sized(shape: tuple[int, ...], num_blocks: int) -> tuple[int, ...]:
    return tuple(-length * num_blocks if length < 0 else length for length in shape)


def ring_of(shape: Shape) -> int:
    """Return the staging bytes with which a ring passes two pages at once."""
    return 4 * 3 * shape.group.page_pitch_bytes


def move_around_capacity(rank: DeviceRank, counts: Sequence[int] = (1, 2, 3, 4, 11, 12, 13, 39)) -> None:
    """Move so many pages there and back, counts around what one chunk of the ring and the whole ring hold, and compare
    every byte with what the oracle moves."""
    for seed, count in enumerate(counts):
        pages, blocks = rank.picked(count, seed)
        wanted = rank.expected_offload(pages, blocks)
        done = rank.submit(JobKind.OFFLOAD, pages, blocks).result(DEADLINE_S)
        assert (done.failed_pages, done.error, done.bytes) == ((), None, count * rank.group.page_bytes)
        assert (rank.arena.buffer == wanted).all()
        pages, blocks = rank.picked(count, 100 + seed)
        loaded = rank.expected_load(pages, blocks)
        done = rank.submit(JobKind.LOAD, pages, blocks).result(DEADLINE_S)
        assert (done.failed_pages, done.error, done.bytes) == ((), None, count * rank.group.page_bytes)
        assert same(loaded, rank.snapshot())
