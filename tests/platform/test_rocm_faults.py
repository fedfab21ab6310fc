"""A thousand failures of the HIP runtime in the middle of transfers: nothing leaks, no byte is wrong.

A copy engine's own mistakes are planted here too, to show that the simulated runtime sees each.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import random
import time
from dataclasses import dataclass
from typing import Any

import pytest
from device_rank import DEADLINE_S, ENGINES, SMALL, same, shapes
from hip_rank import HipRank
from hip_simulator import ILLEGAL_ADDRESS, OUT_OF_MEMORY, simulator

from kvhoist.copy.ring import Chunk, StagingRing
from kvhoist.errors import DeviceError
from kvhoist.memory import pinned
from kvhoist.messages import JobKind
from kvhoist.platform.base import MemoryRegion, Stream
from kvhoist.platform.gpu import GpuRegistration
from kvhoist.platform.gpu_streams import GpuStream

NUM_FAILURES = 1000
BY_NAME = {shape.name: shape for shape in shapes()}


@dataclass(frozen=True)
class Kind:
    """A failure that was seen in the field, as a call of the runtime that fails and what it answers."""

    name: str
    call: str
    code: int


KINDS = (
    Kind("a chunk of host memory cannot be registered", "hipHostRegister", OUT_OF_MEMORY),
    Kind("registered memory has no address on the device", "hipHostGetDevicePointer", 1),
    Kind("the device has no room for staging or for ids", "hipMalloc", OUT_OF_MEMORY),
    Kind("a batch copy fails", "hipMemcpyBatchAsync", 1),
    Kind("a copy of one page blob fails", "hipMemcpyAsync", 1),
    Kind("a copy of one layer's rows fails", "hipMemcpy2DAsync", 1),
    Kind("the kernel faults on its first write-back", "hipModuleLaunchKernel", ILLEGAL_ADDRESS),
    Kind("a copy cannot wait for the kernels that produce the KV", "hipStreamWaitEvent", 400),
    Kind("nothing can wait for a copy", "hipEventRecord", 400),
    Kind("no code object for this GPU", "hipModuleLoadData", 209),
)


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """What pytest keeps of a logged traceback would keep the rank alive."""
    caplog.set_level(logging.CRITICAL, logger="kvhoist")


def transfers(rank: HipRank, rng: random.Random) -> int:
    """Offload a few pages, load others, and compare every byte but those that a failed job was to write. Return how
    many of the two jobs failed."""
    num_failed = 0
    for kind in (JobKind.OFFLOAD, JobKind.LOAD):
        pages, blocks = rank.picked(rng.choice((1, 2, 5)), rng.randrange(1 << 30))
        wanted, loaded = rank.arena.buffer.copy(), rank.snapshot()
        if kind is JobKind.OFFLOAD:
            wanted = rank.expected_offload(pages, blocks)
        else:
            loaded = rank.expected_load(pages, blocks)
        try:
            after = rank.record()
        except DeviceError:  # the engine's own event
            after = None
        done = rank.submit(kind, pages, blocks, after).result(DEADLINE_S)
        held = rank.snapshot()
        assert done.failed_pages == (tuple(range(len(pages))) if done.error else ())
        if done.error:
            num_failed += 1
            if kind is JobKind.OFFLOAD:
                by_page = (-1, rank.group.page_pitch_bytes)
                wanted.reshape(by_page)[pages] = rank.arena.buffer.reshape(by_page)[pages]
            for name in loaded if kind is JobKind.LOAD else ():
                for tensor, now in zip(loaded[name], held[name], strict=True):
                    tensor[blocks] = now[blocks]
        assert (rank.arena.buffer == wanted).all()
        assert same(loaded, held)
    return num_failed


Way = tuple[str, bool, bool]
"""An engine, whether layers share an allocation, and whether the runtime has batch copies."""
WAYS = tuple(itertools.product(ENGINES, (False, True), (False, True)))


def one_round(hip: Any, rng: random.Random, way: Way) -> tuple[int, int]:
    """Open a rank, move, let what fails be over, move again, and close it. Return how many jobs failed, and how many
    failures struck."""
    engine, shared, batches = way
    struck, num_failed = hip.num_pending, 0  # where opening fails
    options = {"io_backend": engine, "shared": shared, "staging_bytes": 12 * 4096 * rng.choice((1, 8))}
    with contextlib.suppress(DeviceError), HipRank(SMALL, num_blocks=24, host_pages=12, **options) as rank:
        rank.platform.driver.has_batch_copies = batches
        num_failed = transfers(rank, rng)
        struck -= hip.num_pending
        hip.repair()
        hip.pause(seed=rng.randrange(1 << 30), longest_us=50, one_in=8)
        assert transfers(rank, rng) == 0, "a failure that is over still fails jobs"
    hip.repair()
    return num_failed, struck


def calls_of(hip: Any, way: Way) -> dict[str, int]:
    """Return how often a round that does not fail comes to each call that may."""
    before = {kind.call: hip.calls(kind.call) for kind in KINDS}
    assert one_round(hip, random.Random(1), way) == (0, 0)
    # Both halves of the round, but for opening it, do the same.
    return {call: -(-(hip.calls(call) - count) // 2) for call, count in before.items()}


def test_a_thousand_failures_leak_nothing_and_change_no_byte(hip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call number n of every kind, in opening a rank or in the middle of a transfer, by every engine."""
    monkeypatch.setattr("kvhoist.copy.choose.GROUP_BYTES", 1)  # loads arrive in groups of layers
    rng = random.Random(20)
    num_struck = dict.fromkeys((kind.name for kind in KINDS), 0)
    num_failed = 0
    gc.collect()
    gc.freeze()
    try:
        calls = {way: calls_of(hip, way) for way in WAYS}
        for kind in itertools.cycle(KINDS):
            way = rng.choice([way for way in WAYS if calls[way][kind.call]])
            hip.fail(kind.call, after=rng.randrange(calls[way][kind.call]), code=kind.code)
            failed, struck = one_round(hip, rng, way)
            num_failed += failed
            num_struck[kind.name] += struck
            if hip.live():
                gc.collect()
            assert hip.live() == {}, f"{kind.name}, {way}"
            if sum(num_struck.values()) == NUM_FAILURES:
                break
    finally:
        gc.unfreeze()
    assert min(num_struck.values()) >= NUM_FAILURES // 20, num_struck
    assert num_failed >= NUM_FAILURES // 4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_device_that_is_gone_takes_its_jobs_with_it_and_leaves_nothing(hip: Any, engine: str) -> None:
    with HipRank(SMALL, num_blocks=24, host_pages=12, io_backend=engine) as rank:
        transfers(rank, random.Random(1))
        hip.break_device()
        for kind in (JobKind.OFFLOAD, JobKind.LOAD):
            done = rank.submit(kind, *rank.picked(5, 3)).result(DEADLINE_S)
            assert done.failed_pages == tuple(range(5))
            assert "hipErrorIllegalAddress (700)" in str(done.error)
        assert rank.mover.num_open == 0
    del rank
    gc.collect()
    assert hip.live() == {}
    hip.repair()


def test_a_copy_that_fails_keeps_the_ring_until_nothing_of_it_is_under_way(
    hip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that was taken and not given back is one that nobody waits for."""
    chunks: list[Chunk] = []
    was_filled: list[bool] = []
    take, leave = StagingRing.take, StagingRing.__exit__

    def taking(ring: StagingRing, *args: Any) -> Chunk:
        chunks.append(take(ring, *args))
        return chunks[-1]

    def leaving(ring: StagingRing, *error: Any) -> None:
        was_filled.append(chunks[-1].filled.query())
        leave(ring, *error)

    hip.pause(seed=3, longest_us=200_000, one_in=1)
    with HipRank(SMALL, num_blocks=24, host_pages=12, io_backend="staged") as rank:
        monkeypatch.setattr(StagingRing, "take", taking)
        monkeypatch.setattr(StagingRing, "__exit__", leaving)
        hip.fail("hipModuleLaunchKernel")
        assert rank.submit(JobKind.LOAD, *rank.picked(5, 3)).result(DEADLINE_S).failed_pages == tuple(range(5))
        assert was_filled == [True]
    chunks.clear()


# -- planted mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("waits", [True, False])
def test_an_offload_that_does_not_wait_for_its_producer_stores_other_bytes(
    hip: Any, monkeypatch: pytest.MonkeyPatch, engine: str, waits: bool
) -> None:
    with HipRank(SMALL, num_blocks=24, host_pages=12, io_backend=engine) as rank:
        pages, blocks = rank.picked(5, 1)
        keys = rank.tensors["k"]

        def produce() -> None:
            time.sleep(0.02)  # slow on purpose
            for tensor in keys:
                tensor[blocks] = 77

        rank.enqueue(produce)
        after, real = rank.record(), GpuStream.wait

        def wait(stream: Stream, event: Any) -> None:
            if waits or event is not after:
                real(stream, event)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(GpuStream, "wait", wait)
            assert rank.submit(JobKind.OFFLOAD, pages, blocks, after).result(DEADLINE_S).error is None
        rank.model.synchronize()
        assert (rank.arena.buffer == rank.expected_offload(pages, blocks)).all() == waits


def test_a_kernel_that_gets_host_addresses_for_the_devices_breaks_the_device(
    hip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = GpuRegistration.__init__

    def untranslated(registration: GpuRegistration, driver: Any, region: MemoryRegion) -> None:
        real(registration, driver, region)
        registration.device_address = region.address

    monkeypatch.setattr(GpuRegistration, "__init__", untranslated)
    with HipRank(SMALL, num_blocks=24, host_pages=12, io_backend="mapped") as rank:
        done = rank.submit(JobKind.OFFLOAD, *rank.picked(5, 1)).result(DEADLINE_S)
        assert "hipErrorIllegalAddress" in str(done.error)
        assert "a host address of registered memory" in hip.message
    hip.repair()


@pytest.mark.parametrize("engine", ENGINES)
def test_pages_that_lie_in_two_registrations_are_not_moved(
    hip: Any, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Pieces of about one and a half pages: a copy that spans two is refused, a kernel walks off an alias."""

    class Splitting(pinned.PinnedArena):
        def __init__(self, arena: Any, platform: Any) -> None:
            super().__init__(arena, platform)
            pieces, step = [], arena.layout.group.page_pitch_bytes * 3 // 2 + 4096
            self.close()
            for start in range(0, arena.num_bytes, step):
                length = min(step, arena.num_bytes - start)
                pieces.append(platform.register(MemoryRegion(self.region.address + start, length)))
            self._registrations = pieces

    monkeypatch.setattr("kvhoist.device_copies.PinnedArena", Splitting)
    shape = BY_NAME["slots, whole pages"]
    with HipRank(shape, num_blocks=8, host_pages=6, io_backend=engine) as rank:
        done = rank.submit(JobKind.OFFLOAD, [1], [3]).result(DEADLINE_S)
        wanted = {"mapped": "hipErrorIllegalAddress"}.get(engine, "hipErrorInvalidValue")
        assert wanted in str(done.error)
    hip.repair()


def test_memory_that_stays_registered_is_counted(hip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    close: Any = GpuRegistration.close
    left: list[GpuRegistration] = []
    monkeypatch.setattr(GpuRegistration, "close", lambda registration: left.append(registration))
    with HipRank(SMALL, num_blocks=24, host_pages=12, io_backend="dma") as rank:
        transfers(rank, random.Random(1))
    del rank
    gc.collect()
    assert hip.live()["registrations"] == 1
    close(left[0])
    left.clear()
    assert simulator().live() == {}
