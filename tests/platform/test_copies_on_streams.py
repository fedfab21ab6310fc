"""The copy engines and the mover on streams that really run later: no wait is missing, no byte is wrong."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fake_streams
import kernel_shim
import numpy as np
import pytest
from fake_streams import GPU, FakePlatform, FakeStream

from kvhoist.copy import choose, device_kernels
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.reference import BoundPlan
from kvhoist.copy.ring import Chunk, StagingRing
from kvhoist.device_layout import DeviceCache, read_device_layout
from kvhoist.errors import ConfigError, DeviceError
from kvhoist.geometry import CacheGeometry
from kvhoist.memory.arena import HostArena
from kvhoist.memory.pinned import PinnedArena
from kvhoist.messages import LEFT_OUT, Completion, Job, JobKind
from kvhoist.mover import Mover
from kvhoist.platform.base import MemoryRegion
from kvhoist.transfer import Transfer

pytestmark = pytest.mark.skipif(kernel_shim.compiler() is None, reason="no C++ compiler here")

DEADLINE_S = 20
NUM_BLOCKS, NUM_PAGES, PER_PAGE = 48, 20, 2
GROUP = CacheGeometry.attention(5, k_row_bytes=64, v_row_bytes=32, page_tokens=8, blocks_per_page=PER_PAGE).groups[0]


ENGINES = ("staged", "dma", "mapped")
every_engine = pytest.mark.parametrize("engine", ENGINES)


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


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return kernel_shim.build(tmp_path_factory.mktemp("kernel"))


class Rank:
    def __init__(self, library: ctypes.CDLL, *, pause_s: float = 0.0, **options: Any) -> None:
        rng = np.random.default_rng(3)
        self.tensors = {
            c.name: [rng.integers(0, 256, (NUM_BLOCKS, 4, c.row_bytes), dtype=np.uint8) for _ in c.layers]
            for c in GROUP.components
        }
        read = read_device_layout(GROUP, self.tensors, "block token dim")
        regions = tuple(MemoryRegion(r.address, r.num_bytes, GPU, r.owner) for r in read.buffers)
        self.device: DeviceCache = replace(read, buffers=regions, device=GPU)
        self.arena = HostArena(GROUP, num_pages=NUM_PAGES)
        self.arena.buffer[:] = rng.integers(0, 256, self.arena.num_bytes, dtype=np.uint8)
        self.kernels = Kernels(library, pause_s)
        self.platform = FakePlatform(self.kernels, list(regions))
        self.answers: list[Completion] = []
        self.mover = Mover(
            GROUP,
            self.device,
            self.arena,
            platform=self.platform,  # type: ignore[arg-type]
            on_complete=self.answers.append,
            **{"staging_bytes": 4 * 8192, "io_backend": "staged", **options},
        )
        self._next_id = 0

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.mover.close(timeout_s=DEADLINE_S)
        assert self.platform.registered == [], "host memory stays pinned"

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


def _compare(a: np.ndarray, b: np.ndarray, same: list[bool]) -> None:
    same.append(bool((a == b).all()))


@pytest.fixture(autouse=True)
def no_compiler_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image is not looked at: the shim's kernels run."""

    class Image:
        image = b""

    monkeypatch.setattr(device_kernels, "compile_kernels", lambda *_, **__: Image())


@every_engine
@pytest.mark.parametrize("count", [1, 2, 7, 19])
def test_both_directions_move_what_the_oracle_moves(library: ctypes.CDLL, count: int, engine: str) -> None:
    with Rank(library, io_backend=engine) as rank:
        for seed in range(4):
            pages, blocks = rank.picked(count, seed)
            wanted = rank.offloaded(pages, blocks)
            done = rank.submit(JobKind.OFFLOAD, pages, blocks).result(DEADLINE_S)
            assert (done.failed_pages, done.bytes) == ((), count * GROUP.page_bytes)
            assert (rank.arena.buffer == wanted).all()
            pages, blocks = rank.picked(count, 50 + seed)
            loaded = rank.loaded(pages, blocks)
            assert rank.submit(JobKind.LOAD, pages, blocks).result(DEADLINE_S).failed_pages == ()
            assert rank.holds(loaded)


@every_engine
def test_a_stream_that_waits_for_a_layer_finds_it(
    library: ctypes.CDLL, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's stream reads a layer as soon as it may; the copy's later layers are still on the way."""
    monkeypatch.setattr(choose, "GROUP_BYTES", 1)
    with Rank(library, io_backend=engine) as rank:
        model = FakeStream(fake_streams.Priority.NORMAL, 7)
        for seed in range(10):
            pages, blocks = rank.picked(15, seed)
            wanted = rank.loaded(pages, blocks)
            load = rank.submit(JobKind.LOAD, pages, blocks, rank.platform.record(model))
            right: list[bool] = []
            for layer in GROUP.layers:
                load.wait(layer, stream=model, timeout_s=DEADLINE_S)
                read = (rank.tensors["k"][layer], wanted["k"][layer])
                model.enqueue(partial(_compare, *read, right))
            model.synchronize()
            assert right == [True] * len(GROUP.layers)
            assert load.result(DEADLINE_S).failed_pages == ()


@every_engine
def test_blocks_may_be_written_again_once_an_offload_has_read_them(library: ctypes.CDLL, engine: str) -> None:
    with Rank(library, io_backend=engine) as rank:
        model = FakeStream(fake_streams.Priority.NORMAL, 7)
        for seed in range(10):
            pages, blocks = rank.picked(12, seed)
            for value, tensor in enumerate(rank.tensors["k"]):
                model.enqueue(partial(tensor.__setitem__, blocks, 40 + value))
            offload = rank.submit(JobKind.OFFLOAD, pages, blocks, rank.platform.record(model))
            offload.wait_read(model)
            for tensor in rank.tensors["k"]:
                model.enqueue(partial(tensor.__setitem__, blocks, 0xDD))
            assert offload.result(DEADLINE_S).failed_pages == ()
            model.synchronize()
            twins = {"k": [np.full((NUM_BLOCKS, 4, 64), 40 + i, np.uint8) for i in range(5)], "v": rank.tensors["v"]}
            twin = read_device_layout(GROUP, twins, "block token dim")
            wanted = HostArena(GROUP, num_pages=NUM_PAGES)
            wanted.buffer[:] = rank.arena.buffer
            plan = CopyPlan.make(twin.layout, wanted.layout)
            BoundPlan(plan, twin.buffers, (wanted.region,)).copy(np.array(blocks), np.array(pages))
            assert (wanted.buffer == rank.arena.buffer).all()


@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
def test_many_jobs_of_both_directions_share_the_ring(library: ctypes.CDLL, engine: str) -> None:
    with Rank(library, io_backend=engine) as rank:
        for seed in range(6):
            pages, blocks = rank.picked(20, seed)
            wanted, loaded = rank.offloaded(pages[:10], blocks[:20]), rank.loaded(pages[10:], blocks[20:])
            transfers = [
                rank.submit(kind, pages[at : at + 2], blocks[2 * at : 2 * at + 4])
                for at in range(0, 10, 2)
                for kind, at in ((JobKind.OFFLOAD, at), (JobKind.LOAD, at + 10))
            ]
            assert all(transfer.result(DEADLINE_S).failed_pages == () for transfer in transfers)
            assert (rank.arena.buffer == wanted).all()
            assert rank.holds(loaded)


@every_engine
def test_debug_verify_reads_the_device_back(library: ctypes.CDLL, engine: str) -> None:
    with Rank(library, debug_verify=True, io_backend=engine) as rank:
        pages, blocks = rank.picked(5, 1)
        assert rank.submit(JobKind.OFFLOAD, pages, blocks).result(DEADLINE_S).failed_pages == ()
        elsewhere = rank.picked(5, 2)[1]
        elsewhere[3] = LEFT_OUT
        assert rank.submit(JobKind.LOAD, pages, elsewhere).result(DEADLINE_S).failed_pages == ()
        rank.arena.page(pages[2])[5] ^= 1
        assert rank.submit(JobKind.LOAD, pages, elsewhere).result(DEADLINE_S).failed_pages == (2,)
        assert rank.mover.num_mismatches == 1


def test_a_device_that_fails_in_the_middle_fails_the_job_and_nothing_is_left_under_way(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rank(library) as rank:
        pages, blocks = rank.picked(15, 1)
        copy, calls = rank.platform.copy_batch, iter(range(100))

        def failing(*arguments: Any) -> None:
            if next(calls) == 2:
                raise DeviceError("CUDA failed in copying", got="CUDA_ERROR_ILLEGAL_ADDRESS (700)")
            copy(*arguments)

        monkeypatch.setattr(rank.platform, "copy_batch", failing)
        failed = rank.submit(JobKind.OFFLOAD, pages, blocks).result(DEADLINE_S)
        assert failed.failed_pages == tuple(range(15))
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(failed.error)
        wanted = rank.offloaded(pages, blocks)
        assert rank.submit(JobKind.OFFLOAD, pages, blocks).result(DEADLINE_S).failed_pages == ()
        assert (rank.arena.buffer == wanted).all()


@every_engine
def test_a_device_that_is_gone_fails_every_job_and_closing_still_ends(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A sticky error: from some moment on every call of the driver fails."""

    def gone(*_: Any, **__: Any) -> Any:
        raise DeviceError("CUDA failed", got="CUDA_ERROR_ILLEGAL_ADDRESS (700)")

    rank = Rank(library, io_backend=engine)
    pages, blocks = rank.picked(5, 1)
    assert rank.submit(JobKind.OFFLOAD, pages, blocks).result(DEADLINE_S).failed_pages == ()
    for call in ("copy", "copy_batch", "copy_batch_2d", "record"):
        monkeypatch.setattr(FakePlatform, call, gone)
    monkeypatch.setattr(FakeStream, "synchronize", gone)
    monkeypatch.setattr(fake_streams.FakeRegistration, "close", gone)
    for kind in (JobKind.OFFLOAD, JobKind.LOAD, JobKind.OFFLOAD):
        failed = rank.submit(kind, pages, blocks).result(DEADLINE_S)
        assert failed.failed_pages == tuple(range(5))
        assert "ILLEGAL_ADDRESS" in str(failed.error)
    assert rank.mover.num_open == 0
    assert rank.mover.close(timeout_s=DEADLINE_S)
    assert "could not be unpinned" in caplog.text


def test_a_cache_on_another_device_is_refused(library: ctypes.CDLL) -> None:
    with Rank(library) as rank:
        elsewhere = replace(rank.device, device=replace(GPU, index=1))
        with pytest.raises(ConfigError, match=r"tensors on fake:1, a platform of fake:0"):
            Mover(GROUP, elsewhere, rank.arena, platform=rank.platform, on_complete=print)  # type: ignore[arg-type]


@pytest.mark.parametrize(("quota", "grid"), [(None, 2), (1, 1), (5, 5)])
def test_mapped_takes_no_more_blocks_than_its_quota(library: ctypes.CDLL, quota: int | None, grid: int) -> None:
    """The platform's, 2 here, where none is set."""
    with Rank(library, io_backend="mapped", block_quota=quota) as rank:
        rank.submit(JobKind.OFFLOAD, *rank.picked(19, 0)).result(DEADLINE_S)
        assert max(rank.kernels.grids) == grid


def test_a_ring_too_small_for_a_page_is_refused(library: ctypes.CDLL) -> None:
    with pytest.raises(ConfigError, match="staging_bytes"):
        Rank(library, staging_bytes=4096)


def test_a_ring_that_the_device_has_no_room_for_is_refused_and_nothing_stays_pinned(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    platforms: list[FakePlatform] = []

    def full(platform: FakePlatform, num_bytes: int) -> MemoryRegion:
        platforms.append(platform)
        raise DeviceError("CUDA failed in allocating", got="CUDA_ERROR_OUT_OF_MEMORY (2)")

    monkeypatch.setattr(FakePlatform, "allocate", full)
    with pytest.raises(DeviceError, match=r"OUT_OF_MEMORY.*Lower staging_bytes"):
        Rank(library)
    assert platforms[0].registered == []


def test_threads_that_cannot_use_the_device_answer_their_jobs_all_the_same(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> Any:
        raise DeviceError("CUDA failed in making the device current", got="CUDA_ERROR_CONTEXT_IS_DESTROYED (709)")

    monkeypatch.setattr(FakePlatform, "enter_thread", gone)
    monkeypatch.setattr(FakePlatform, "copy_batch", gone)
    with Rank(library) as rank:
        pages, blocks = rank.picked(3, 1)
        failed = rank.submit(JobKind.LOAD, pages, blocks).result(DEADLINE_S)
        assert failed.failed_pages == (0, 1, 2)
        assert "CONTEXT_IS_DESTROYED" in str(failed.error)


@pytest.mark.parametrize("without", ["free", "filled"])
def test_a_missing_wait_is_noticed(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    """The negative control of the tests above: drop one kind of wait, and bytes are wrong."""
    waits, take, copy_batch = FakeStream.wait, StagingRing.take, FakePlatform.copy_batch
    taken: list[Chunk] = []

    def slowly(platform: FakePlatform, *batch: Any) -> None:
        batch[-1].enqueue(partial(time.sleep, 0.005 if without == "filled" else 0.0))
        copy_batch(platform, *batch)

    def taking(ring: StagingRing, num_bytes: int, stream: Any) -> Chunk:
        if without == "free":
            monkeypatch.setattr(FakeStream, "wait", lambda *_: None)
        taken.append(take(ring, num_bytes, stream))
        monkeypatch.setattr(FakeStream, "wait", waits if without == "free" else all_but_filled)
        return taken[-1]

    def all_but_filled(stream: FakeStream, event: Any) -> None:
        if event is not taken[-1].filled:
            waits(stream, event)

    monkeypatch.setattr(StagingRing, "take", taking)
    monkeypatch.setattr(FakePlatform, "copy_batch", slowly)
    wrong = []
    for seed in range(4):
        with Rank(library, pause_s=0.005 if without == "free" else 0.0) as rank:
            pages, blocks = rank.picked(18, seed)
            loaded = rank.loaded(pages, blocks)
            assert rank.submit(JobKind.LOAD, pages, blocks).result(DEADLINE_S).failed_pages == ()
            wrong.append(not rank.holds(loaded))
    assert any(wrong)


@pytest.fixture
def arena() -> Iterator[HostArena]:
    with HostArena(GROUP, num_pages=10) as held:
        yield held


def test_pieces_that_are_pinned_never_split_a_page(arena: HostArena, library: ctypes.CDLL) -> None:
    platform = FakePlatform(None, [])
    pitch = GROUP.page_pitch_bytes
    with PinnedArena(arena, platform, piece_bytes=3 * pitch + 100) as pinned:  # type: ignore[arg-type]
        assert pinned.num_pieces == 4
        lengths = [region.num_bytes for region in platform.registered]
        assert lengths == [3 * pitch, 3 * pitch, 3 * pitch, pitch]
        assert all((region.address - arena.region.address) % pitch == 0 for region in platform.registered)
    assert platform.registered == []


def test_what_was_pinned_before_a_refusal_is_unpinned(arena: HostArena, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = FakePlatform(None, [])
    register, calls = platform.register, iter(range(10))

    def refusing(region: MemoryRegion) -> Any:
        if next(calls) == 2:
            raise DeviceError("CUDA failed in pinning", got="CUDA_ERROR_OUT_OF_MEMORY (2)")
        return register(region)

    monkeypatch.setattr(platform, "register", refusing)
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        PinnedArena(arena, platform, piece_bytes=GROUP.page_pitch_bytes)  # type: ignore[arg-type]
    assert platform.registered == []


def test_the_shim_is_what_the_repository_ships(tmp_path: Path) -> None:
    assert kernel_shim.SOURCE.read_text().count("KVHOIST_KERNEL(") == 4
