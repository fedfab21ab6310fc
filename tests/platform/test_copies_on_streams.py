"""The copy engines and the mover on streams that really run later: no wait is missing, no byte is wrong."""

from __future__ import annotations

import ctypes
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fake_streams
import kernel_shim
import numpy as np
import pytest
from fake_streams import GPU, FakePlatform, FakeStream
from stream_rank import DEADLINE_S, GROUP, NUM_BLOCKS, NUM_PAGES, Rank

from kvhoist.copy import choose, device_kernels
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.reference import BoundPlan
from kvhoist.copy.ring import Chunk, StagingRing
from kvhoist.device_layout import read_device_layout
from kvhoist.errors import ConfigError, DeviceError
from kvhoist.memory.arena import HostArena
from kvhoist.messages import LEFT_OUT, JobKind
from kvhoist.mover import Mover
from kvhoist.platform.base import MemoryRegion

pytestmark = pytest.mark.skipif(kernel_shim.compiler() is None, reason="no C++ compiler here")

ENGINES = ("staged", "dma", "mapped")
every_engine = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return kernel_shim.build(tmp_path_factory.mktemp("kernel"))


@pytest.fixture(params=["fake", "rocm"])
def kernels(request: pytest.FixtureRequest) -> ctypes.CDLL | None:
    """The kernels of both platforms that streams are run on."""
    if request.param == "fake":
        return request.getfixturevalue("library")
    request.getfixturevalue("hip")
    return None


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
def test_both_directions_move_what_the_oracle_moves(kernels: ctypes.CDLL | None, count: int, engine: str) -> None:
    with Rank(kernels, io_backend=engine) as rank:
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
def test_nothing_but_pages_crosses_the_link_by_copies(
    library: ctypes.CDLL, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids that went by a copy would queue behind all pages of other transfers in that direction."""
    copied: list[tuple[int, int]] = []
    plain = FakePlatform.copy

    def copy(self: FakePlatform, source: int, destination: int, num_bytes: int, stream: FakeStream) -> None:
        copied.append((source, destination))
        plain(self, source, destination, num_bytes, stream)

    monkeypatch.setattr(FakePlatform, "copy", copy)
    with Rank(library, io_backend=engine) as rank:
        for kind, host_side in ((JobKind.LOAD, 0), (JobKind.OFFLOAD, 1)):
            copied.clear()
            assert rank.submit(kind, *rank.picked(7, 1)).result(DEADLINE_S).failed_pages == ()
            region = rank.arena.region
            assert (copied == []) == (engine == "mapped")
            assert all(region.address <= ends[host_side] < region.end for ends in copied)


@every_engine
def test_a_stream_that_waits_for_a_layer_finds_it(
    kernels: ctypes.CDLL | None, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's stream reads a layer as soon as it may; the copy's later layers are still on the way."""
    monkeypatch.setattr(choose, "GROUP_BYTES", 1)
    with Rank(kernels, io_backend=engine) as rank:
        model = rank.platform.make_stream()
        for seed in range(10):
            pages, blocks = rank.picked(15, seed)
            wanted = rank.loaded(pages, blocks)
            load = rank.submit(JobKind.LOAD, pages, blocks, rank.platform.record(model))
            right: list[bool] = []
            for layer in GROUP.layers:
                load.wait(layer, stream=model, timeout_s=DEADLINE_S)
                read = (rank.tensors["k"][layer], wanted["k"][layer])
                rank.enqueue(model, partial(_compare, *read, right))
            model.synchronize()
            assert right == [True] * len(GROUP.layers)
            assert load.result(DEADLINE_S).failed_pages == ()


@every_engine
def test_blocks_may_be_written_again_once_an_offload_has_read_them(kernels: ctypes.CDLL | None, engine: str) -> None:
    with Rank(kernels, io_backend=engine) as rank:
        model = rank.platform.make_stream()
        for seed in range(10):
            pages, blocks = rank.picked(12, seed)
            for value, tensor in enumerate(rank.tensors["k"]):
                rank.enqueue(model, partial(tensor.__setitem__, blocks, 40 + value))
            offload = rank.submit(JobKind.OFFLOAD, pages, blocks, rank.platform.record(model))
            offload.wait_read(model)
            for tensor in rank.tensors["k"]:
                rank.enqueue(model, partial(tensor.__setitem__, blocks, 0xDD))
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
def test_many_jobs_of_both_directions_share_the_ring(kernels: ctypes.CDLL | None, engine: str) -> None:
    with Rank(kernels, io_backend=engine) as rank:
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
def test_debug_verify_reads_the_device_back(kernels: ctypes.CDLL | None, engine: str) -> None:
    with Rank(kernels, debug_verify=True, io_backend=engine) as rank:
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
    allocate, ring_bytes = FakePlatform.allocate, 2 * 8192

    def full(platform: FakePlatform, num_bytes: int) -> MemoryRegion:
        if num_bytes != ring_bytes:
            return allocate(platform, num_bytes)
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


def test_the_shim_is_what_the_repository_ships(tmp_path: Path) -> None:
    assert kernel_shim.SOURCE.read_text().count("KVHOIST_KERNEL(") == 4
