"""Correctness: every engine, layout, component kind and page count, every byte against the numpy oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from device_rank import DEADLINE_S, ENGINES, GUARD, GUARD_BYTES, DeviceRank, Shape, ring_of, shapes

from kvhoist.bench.device_cache import DeviceTensor
from kvhoist.errors import KvhoistError
from kvhoist.layout import HostOrder
from kvhoist.messages import JobKind
from kvhoist.platform.base import MemoryRegion, Platform, region_of
from rocm_acceptance.target import Row, Target

COUNTS = (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 39)
"""Below, at and above what one chunk of the ring holds (2) and all of it (6)."""
_FEW = (1, 2, 3, 6, 7)


class PlainRank(DeviceRank):
    """A rank whose device memory is the platform's and is read by plain copies: no torch. `shared`: the layers of a
    component stand in one allocation, which lets `dma` make 2-D copies."""

    def __init__(self, shape: Shape, *, shared: bool = False, **options: Any) -> None:
        self._shared = shared
        self._random = np.random.default_rng(3)
        super().__init__(shape, **options)
        self._window = Window(self.platform, max(tensor.region.num_bytes for tensor in self._guarded))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._window.close()

    def snapshot(self) -> dict[str, list[np.ndarray]]:
        held = {id(tensor.region): self._window.read(tensor.region) for tensor in self._guarded}

        def read(tensor: DeviceTensor) -> np.ndarray:
            start = tensor.data_ptr() - tensor.region.address
            return held[id(tensor.region)][start : start + tensor.nbytes()].reshape(tensor.shape)

        return {name: [read(tensor) for tensor in tensors] for name, tensors in self.tensors.items()}

    def guards_touched(self) -> int:
        """Return how many bytes around the tensors are not what they were."""
        touched = 0
        for whole in self._guarded:
            rows = self._window.read(whole.region).reshape(whole.shape)
            for guard in (rows[:, :GUARD_BYTES], rows[:, -GUARD_BYTES:]):
                touched += int(np.count_nonzero(guard != GUARD))
        return touched

    def _layers(self, shape: tuple[int, ...], num_layers: int) -> list[DeviceTensor]:
        length = math.prod(shape)
        pitch = length + 2 * GUARD_BYTES
        made = []
        for rows in (num_layers,) if self._shared else (1,) * num_layers:
            bytes_ = np.full((rows, pitch), GUARD, dtype=np.uint8)
            bytes_[:, GUARD_BYTES:-GUARD_BYTES] = self._random.integers(0, 256, (rows, length), dtype=np.uint8)
            region = self.platform.allocate(bytes_.nbytes)
            self.platform.write(region, bytes_)
            self._guarded.append(DeviceTensor(region, bytes_.shape))
            made += [DeviceTensor(region, shape, row * pitch + GUARD_BYTES) for row in range(rows)]
        return made


class Window:
    """Pinned host memory through which device memory is read."""

    def __init__(self, platform: Platform, num_bytes: int) -> None:
        self._platform = platform
        raw = np.zeros(num_bytes + 2 * 4096, dtype=np.uint8)
        start = -region_of(raw).address % 4096
        self._bytes = raw[start : start + -(-num_bytes // 4096) * 4096]
        self._stream = platform.make_stream()
        self._pinned = platform.register(region_of(self._bytes))

    def read(self, region: MemoryRegion) -> np.ndarray:
        """Return a copy of the region's bytes."""
        with self._platform.current():
            self._platform.copy(region.address, self._pinned.region.address, region.num_bytes, self._stream)
        self._stream.synchronize()
        return self._bytes[: region.num_bytes].copy()

    def close(self) -> None:
        self._pinned.close()


def moved(rank: PlainRank, counts: Sequence[int]) -> Row:
    """Move so many pages to the host and back, each count's, and return how many bytes of arena, cache and guards are
    not what the oracle says. Raises TransferError where a copy fails."""
    num_bytes = differing = 0
    for seed, count in enumerate(counts):
        pages, blocks = rank.picked(count, seed)
        wanted = rank.expected_offload(pages, blocks)
        num_bytes += rank.submit(JobKind.OFFLOAD, pages, blocks).result(DEADLINE_S).bytes
        differing += int(np.count_nonzero(rank.arena.buffer != wanted))
        pages, blocks = rank.picked(count, 100 + seed)
        loaded = rank.expected_load(pages, blocks)
        num_bytes += rank.submit(JobKind.LOAD, pages, blocks).result(DEADLINE_S).bytes
        found = rank.snapshot()
        pairs = ((a, b) for name in loaded for a, b in zip(loaded[name], found[name], strict=True))
        differing += sum(int(np.count_nonzero(a != b)) for a, b in pairs)
    differing += rank.guards_touched()
    expected = 2 * sum(counts) * rank.group.page_bytes
    found = {"pages": list(counts), "bytes": num_bytes, "differing_bytes": differing}
    return {**found, "pass": (differing, num_bytes) == (0, expected)}


def run(target: Target) -> Iterator[Row]:
    """Yield a row for each layout and component kind, order of host pages and engine."""
    yield from _rows(shapes(), ENGINES, _FEW if target.is_simulated else COUNTS)


def run_driver_owned(target: Target) -> Iterator[Row]:
    """As `run`, of a few kinds, where host memory is the driver's (HSA_USERPTR_FOR_PAGED_MEM=0)."""
    if target.is_simulated:
        # Its memory is this process's, whose pages could move.
        from kvhoist.platform import rocm_host

        rocm_host.may_move = lambda address: False  # type: ignore[assignment]
    some = [shape for shape in shapes() if shape.name in ("blocks of tokens", "latent and index")]
    yield from _rows(some, ENGINES, _FEW if target.is_simulated else COUNTS)


def _rows(some: Sequence[Shape], engines: Sequence[str], counts: Sequence[int]) -> Iterator[Row]:
    for shape in some:
        for order in (HostOrder.PAGE_FIRST_DIRECT, HostOrder.PAGE_FIRST):
            for engine in engines:
                shared = order is HostOrder.PAGE_FIRST
                what = {"cache": shape.name, "order": str(order), "engine": engine, "one_allocation": shared}
                yield {**what, **_row(shape, order, engine, counts, shared=shared)}


def _row(shape: Shape, order: str, engine: str, counts: Sequence[int], *, shared: bool) -> Row:
    most = max(counts) + 1
    sizes = {"num_blocks": most * max(1, shape.group.blocks_per_page), "host_pages": most}
    try:
        with PlainRank(
            shape, order=order, io_backend=engine, staging_bytes=ring_of(shape), shared=shared, **sizes
        ) as rank:
            return moved(rank, counts)
    except KvhoistError as error:
        return {"pages": list(counts), "error": str(error), "pass": False}
