"""One rank's data plane without a control plane: device tensors of known bytes, a mover, a store that can be held."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hip_simulator import device_array, on_device

from kvhoist.device_layout import DeviceCache, read_device_layout
from kvhoist.geometry import CacheGeometry
from kvhoist.memory.arena import HostArena
from kvhoist.messages import WHOLE, Completion, Job, JobKind, PageKey, StorageKey
from kvhoist.mover import Mover
from kvhoist.platform.base import CPU, Device
from kvhoist.platform.open import open_platform
from kvhoist.storage import MemoryStore, Sealer, StorageIO
from kvhoist.storage.base import Buffer
from kvhoist.transfer import Transfer

DEADLINE_S = 20
NUM_LAYERS = 3
BLOCKS_PER_PAGE = 2
NAMESPACE = bytes(range(32))


def page_hash(number: int) -> bytes:
    return sha256(b"page %d" % number).digest()


def storage_key(number: int) -> StorageKey:
    return StorageKey(PageKey(NAMESPACE, 0, page_hash(number)), WHOLE)


def until(condition: Callable[[], bool], what: str = "it") -> None:
    """Poll, with a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in time"
        time.sleep(0.001)


@pytest.fixture(params=["cpu", "rocm"], autouse=True)
def every_platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported by a module, runs all of its tests on the CPU and on the simulated HIP runtime."""
    if request.param == "rocm":
        request.getfixturevalue("hip")
        monkeypatch.setattr(Rank, "where", Device("cuda"))


class HeldStore(MemoryStore):
    """Lets a put go on only while `gate` is open, then looks at the bytes again; says which puts began and which keys
    were put; may be told to raise, or to have no room."""

    def __init__(self) -> None:
        super().__init__("64MiB")
        self.gate = threading.Event()
        self.gate.set()
        self.fault: BaseException | None = None
        self.full = False
        self.begun: list[StorageKey] = []
        self.written: dict[StorageKey, bytes] = {}
        self.num_put: dict[StorageKey, int] = {}
        self._books = threading.Lock()

    def put(self, keys: Sequence[StorageKey], headers: Sequence[bytes], blobs: Sequence[Buffer]) -> list[bool]:
        with self._books:
            self.begun += keys
        assert self.gate.wait(DEADLINE_S)
        if self.fault is not None:
            raise self.fault
        if self.full:
            return [False] * len(keys)
        with self._books:
            for key, blob in zip(keys, blobs, strict=True):
                self.num_put[key] = self.num_put.get(key, 0) + 1
                self.written.setdefault(key, bytes(blob))
        return super().put(keys, headers, blobs)


class Rank:
    """Device blocks `2 p` and `2 p + 1` make device page `p`. What page number `n` must hold follows from `n` alone."""

    where: Device = CPU
    """A GPU is the simulated one."""

    def __init__(
        self, *, host_pages: int = 4, device_pages: int = 6, store: Any = None, io_options: Any = None, **options: Any
    ) -> None:
        self.group = CacheGeometry.attention(
            NUM_LAYERS, k_row_bytes=32, v_row_bytes=32, page_tokens=8, blocks_per_page=BLOCKS_PER_PAGE
        ).groups[0]
        shape = (NUM_LAYERS, device_pages * BLOCKS_PER_PAGE, 2, 4, 2, 8)
        platform = open_platform(self.where)
        on_gpu = self.where != CPU
        self.tensor = device_array(platform, shape, np.uint16) if on_gpu else np.zeros(shape, np.uint16)
        self.tensor[:] = 0
        self.device: DeviceCache = read_device_layout(self.group, self.tensor, "layer block kv token head dim")
        if on_gpu:
            self.device = on_device(self.device, platform)
        self.arena = HostArena(self.group, num_pages=host_pages)
        self.store = store
        self.io = None if store is None else StorageIO(store, Sealer(), **(io_options or {}))
        self.answers: list[Completion] = []
        self.on_answer: Callable[[Completion], object] = lambda answer: None
        self.mover = Mover(
            self.group,
            self.device,
            self.arena,
            platform=platform,
            on_complete=self._answered,
            io=self.io,
            **options,
        )
        self._next_id = 0

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.mover.close(drain=False, timeout_s=DEADLINE_S)
        if self.io is not None:
            assert self.io.close(drain=False, timeout_s=DEADLINE_S)
        ids = [answer.id for answer in self.answers if not answer.pending_pages]
        assert sorted(ids) == sorted(set(ids)), "a job was answered twice"
        assert len(ids) == self._next_id, "a job was not answered"

    def _answered(self, answer: Completion) -> None:
        self.answers.append(answer)
        self.on_answer(answer)

    def blocks_of(self, device_pages: Sequence[int]) -> list[int]:
        return [page * BLOCKS_PER_PAGE + i for page in device_pages for i in range(BLOCKS_PER_PAGE)]

    def compute(self, number: int, device_page: int) -> None:
        """Write the bytes of page `number` to a device page."""
        shape = (NUM_LAYERS, BLOCKS_PER_PAGE, *self.tensor.shape[2:])
        values = np.random.default_rng(number).integers(0, 1 << 16, shape, dtype=np.uint16)
        self.tensor[:, self.blocks_of([device_page])] = values

    def holds(self, number: int, device_page: int) -> bool:
        blocks = self.blocks_of([device_page])
        before = self.tensor[:, blocks].copy()
        self.compute(number, device_page)
        same = bool((before == self.tensor[:, blocks]).all())
        self.tensor[:, blocks] = before
        return same

    def submit(
        self,
        kind: JobKind,
        numbers: Sequence[int],
        host_pages: Sequence[int] = (),
        device_pages: Sequence[int] = (),
        *,
        blocks: Sequence[int] | None = None,
        **options: Any,
    ) -> Transfer:
        chosen = self.blocks_of(device_pages) if blocks is None else blocks
        keys = tuple(page_hash(number) for number in numbers)
        job = Job(self._next_id, kind, NAMESPACE, 0, keys, tuple(host_pages), tuple(chosen))
        transfer = self.mover.submit(job, **options)
        self._next_id += 1
        return transfer

    def run(self, *arguments: Any, **options: Any) -> Completion:
        return self.submit(*arguments, **options).result(DEADLINE_S)

    def offload(self, numbers: Sequence[int], host_pages: Sequence[int]) -> Completion:
        """Compute the pages on the first device pages and offload them."""
        device_pages = range(len(numbers))
        for number, page in zip(numbers, device_pages, strict=True):
            self.compute(number, page)
        return self.run(JobKind.OFFLOAD, numbers, host_pages, device_pages)


def blob_of(number: int) -> bytes:
    """The bytes of page `number` as the host and storage keep them: layer, component, token. Knows of no plan."""
    shape = (NUM_LAYERS, BLOCKS_PER_PAGE, 2, 4, 2, 8)
    values = np.random.default_rng(number).integers(0, 1 << 16, shape, dtype=np.uint16)
    return values.swapaxes(1, 2).tobytes()
