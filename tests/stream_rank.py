"""One rank on streams that really run later: those of threads in Python, or of the simulated HIP runtime."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import kernel_shim
import numpy as np
from fake_streams import FakePlatform, FakeStream
from hip_simulator import device_array, on_device, simulator

from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.reference import BoundPlan
from kvhoist.device_layout import DeviceCache, read_device_layout
from kvhoist.geometry import CacheGeometry
from kvhoist.memory.arena import HostArena
from kvhoist.messages import Completion, Job, JobKind
from kvhoist.mover import Mover
from kvhoist.platform.base import Device
from kvhoist.platform.open import open_platform
from kvhoist.transfer import Transfer

DEADLINE_S = 20
NUM_BLOCKS, NUM_PAGES, PER_PAGE = 48, 20, 2
GROUP = CacheGeometry.attention(5, k_row_bytes=64, v_row_bytes=32, page_tokens=8, blocks_per_page=PER_PAGE).groups[0]


class Kernels:
    """The kernels of the shim, run when the stream comes to them, with the parameters of the launch."""

    def __init__(self, library: ctypes.CDLL, pause_s: float = 0.0) -> None:
        self.library = library
        self.pause_s = pause_s
        self.grids: list[int] = []

    def prepare(self, kernel: str, parameters: Any) -> Any:
        word = int(kernel.removeprefix("relayout"))

        class Call:
            @staticmethod
            def launch(grid: int, block: int, stream: FakeStream) -> None:
                now = type(parameters).from_buffer_copy(parameters)
                self.grids.append(grid)
                stream.enqueue(lambda: time.sleep(self.pause_s))
                stream.enqueue(lambda: kernel_shim.run(self.library, word, now, grid, block))

        return Call()


class Rank:
    """`kernels` are the shim's library, or None for the simulated HIP runtime, which has loaded its own."""

    def __init__(self, kernels: ctypes.CDLL | None, *, pause_s: float = 0.0, **options: Any) -> None:
        rng = np.random.default_rng(3)
        self.kernels = Kernels(kernels, pause_s) if kernels else None
        self.platform: Any = FakePlatform(self.kernels, []) if kernels else open_platform(Device("cuda"))
        self.tensors = {
            c.name: [self._on_device(rng.integers(0, 256, (NUM_BLOCKS, 4, c.row_bytes))) for _ in c.layers]
            for c in GROUP.components
        }
        self.device: DeviceCache = on_device(read_device_layout(GROUP, self.tensors, "block token dim"), self.platform)
        self.arena = HostArena(GROUP, num_pages=NUM_PAGES)
        self.arena.buffer[:] = rng.integers(0, 256, self.arena.num_bytes, dtype=np.uint8)
        self.answers: list[Completion] = []
        self.mover = Mover(
            GROUP,
            self.device,
            self.arena,
            platform=self.platform,
            on_complete=self.answers.append,
            **{"staging_bytes": 4 * 8192, "io_backend": "staged", **options},
        )
        self._next_id = 0

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.mover.close(timeout_s=DEADLINE_S)
        if isinstance(self.platform, FakePlatform):
            assert self.platform.registered == [], "host memory stays pinned"

    def enqueue(self, stream: Any, work: Callable[[], object]) -> None:
        """Let one of the platform's streams do `work` when it comes to it."""
        if isinstance(stream, FakeStream):
            stream.enqueue(work)
        else:
            simulator().enqueue(stream, work)

    def _on_device(self, values: np.ndarray) -> np.ndarray:
        array = device_array(self.platform, values.shape)
        array[:] = values
        return array

    def submit(self, kind: JobKind, pages: Sequence[int], blocks: Sequence[int], after: Any = None) -> Transfer:
        keys = tuple(b"key %d" % page for page in pages)
        job = Job(self._next_id, kind, bytes(32), 0, keys, tuple(pages), tuple(blocks))
        self._next_id += 1
        return self.mover.submit(job, after=after)

    def picked(self, count: int, seed: int) -> tuple[list[int], list[int]]:
        rng = random.Random(seed)
        return rng.sample(range(NUM_PAGES), count), rng.sample(range(NUM_BLOCKS), count * PER_PAGE)

    def offloaded(self, pages: Sequence[int], blocks: Sequence[int]) -> np.ndarray:
        wanted = HostArena(GROUP, num_pages=NUM_PAGES)
        wanted.buffer[:] = self.arena.buffer
        twin = read_device_layout(GROUP, self.tensors, "block token dim")
        plan = CopyPlan.make(twin.layout, wanted.layout)
        BoundPlan(plan, twin.buffers, (wanted.region,)).copy(np.array(blocks), np.array(pages))
        return wanted.buffer

    def loaded(self, pages: Sequence[int], blocks: Sequence[int]) -> dict[str, list[np.ndarray]]:
        wanted = {name: [tensor.copy() for tensor in held] for name, held in self.tensors.items()}
        twin = read_device_layout(GROUP, wanted, "block token dim")
        plan = CopyPlan.make(self.arena.layout, twin.layout)
        BoundPlan(plan, (self.arena.region,), twin.buffers).copy(np.array(pages), np.array(blocks))
        return wanted

    def holds(self, wanted: dict[str, list[np.ndarray]]) -> bool:
        return all((a == b).all() for n in wanted for a, b in zip(wanted[n], self.tensors[n], strict=True))
