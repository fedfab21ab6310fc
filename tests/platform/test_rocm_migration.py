"""The arms of the page-migration benchmark on the simulated HIP runtime: all that `run_on_gpu` does, but for torch and
the kernel, which have stand-ins."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvhoist.bench import kfd, migration_child
from kvhoist.bench.kfd import HostPid, KfdProcess
from kvhoist.bench.migration_child import ENVIRONMENT, GTT, REGISTERED, run_on_gpu
from kvhoist.bench.migration_kernel import LinuxKernel, SimulatedKernel
from kvhoist.errors import ConfigError, HostMemoryError, KvhoistError
from kvhoist.platform import rocm_host
from kvhoist.platform.rocm import RocmPlatform

POOL_BYTES = 32 << 20
NODES = (0, 1)
GPU = 51_000


class Machine:
    """What an arm finds: amdkfd's folder, two nodes, a torch whose products run in the simulated stream."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, hip: Any) -> None:
        self.root = root
        self.hip = hip
        self.others: list[int] = []
        self.products = self.ended = self.copies = 0
        (root / "proc").mkdir()
        torch = SimpleNamespace(check_hip=lambda: "7.2", products=self._products)
        monkeypatch.setitem(sys.modules, "kvhoist.bench.migration_torch", torch)
        monkeypatch.setattr(migration_child, "memory_nodes", lambda: NODES)
        for name in ("processes", "find_process"):
            monkeypatch.setattr(migration_child, name, functools.partial(getattr(kfd, name), root=root))
        monkeypatch.setattr(migration_child, "LinuxKernel", self._kernel)
        self._monkeypatch = monkeypatch

    def start(self, arm: str) -> None:
        """Let this process be one that started for `arm`."""
        for name, value in ENVIRONMENT[arm].items():
            self._monkeypatch.setenv(name, value)
        self._moves = SimulatedKernel(driver_owned=arm == GTT)
        if arm == GTT:
            self._monkeypatch.setattr(rocm_host, "may_move", lambda address: False)

    def _products(self, index: int, stream: int) -> Callable[[], None]:
        """Begin to use the GPU, as torch does with its first work."""
        for pid in (os.getpid(), *self.others):
            queue, stats = self.root / f"proc/{pid}/queues/0", self.root / f"proc/{pid}/stats_{GPU}"
            queue.mkdir(parents=True)
            stats.mkdir()
            (queue / "gpuid").write_text(f"{GPU}\n")
            (stats / "evicted_ms").write_text("250\n")  # what starting costs
        matrix = np.ones((32, 32), dtype=np.float32)

        def work() -> None:
            matrix @ matrix
            self.ended += 1

        def enqueue() -> None:
            self.products += 1
            self.hip.enqueue(SimpleNamespace(handle=stream), work)

        return enqueue

    def _kernel(self, nodes: tuple[int, ...], process: KfdProcess) -> LinuxKernel:
        machine = self

        class Kernel(LinuxKernel):
            """amdkfd's counter, which a move of pages that can move adds 64,163 ms to; the moves are simulated."""

            def where(self, pages: Sequence[int]) -> list[int]:
                return machine._moves.where(pages)

            def move(self, pages: Sequence[int], node: int) -> list[int]:
                answers = machine._moves.move(pages, node)
                counter = machine.root / f"proc/{process.pid}/stats_{GPU}/evicted_ms"
                counter.write_text(f"{int(counter.read_text()) + (64_163 if node in answers else 0)}\n")
                return answers

        return Kernel(nodes, process)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hip: Any) -> Machine:
    return Machine(tmp_path, monkeypatch, hip)


def test_registered_memory_is_registered_moves_and_evicts(machine: Machine, hip: Any) -> None:
    machine.start(REGISTERED)
    registered = hip.calls("hipHostRegister")
    answer = run_on_gpu(REGISTERED, 0, HostPid.FIND, POOL_BYTES, 2)
    assert hip.calls("hipHostRegister") == registered + 1
    assert answer["evicted_ms"] == 6 * 64_163, "what the process had before its iterations is none of theirs"
    assert {m["moved"] for m in answer["migrations"]} == {512}
    assert machine.products == 20 + 3 * 2
    assert (answer["compared"], answer["host_pid"]) == (4, os.getpid())
    assert (answer["device"]["gpu_arch"], answer["device"]["hip"]) == ("gfx942", "7.2")


def test_driver_owned_memory_is_allocated_and_never_registered(machine: Machine, hip: Any) -> None:
    machine.start(GTT)
    registered, allocated = hip.calls("hipHostRegister"), hip.calls("hipHostMalloc")
    answer = run_on_gpu(GTT, 0, HostPid.FIND, POOL_BYTES, 2)
    assert (hip.calls("hipHostRegister"), hip.calls("hipHostMalloc")) == (registered, allocated + 1)
    assert (answer["evicted_ms"], answer["compared"]) == (0, 4)
    assert [m["answers"] for m in answer["migrations"]] == [{"EFAULT": 512}] * 6


def test_an_iteration_ends_when_its_products_have(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.start(REGISTERED)
    machine.hip.pause(seed=3, longest_us=2000, one_in=1)
    copy, before = RocmPlatform.copy, []

    def look(self: RocmPlatform, *arguments: Any) -> None:
        before.append(machine.products - machine.ended)
        copy(self, *arguments)

    monkeypatch.setattr(RocmPlatform, "copy", look)
    run_on_gpu(REGISTERED, 0, HostPid.FIND, POOL_BYTES, 2)
    assert max(before) == 1, "an iteration began before the one before it had ended"


@pytest.mark.parametrize("arm", [REGISTERED, GTT])
def test_a_failure_of_the_runtime_leaves_nothing_behind(machine: Machine, hip: Any, arm: str) -> None:
    """The fixture sees to what is left."""
    machine.start(arm)
    hip.fail("hipHostRegister" if arm == REGISTERED else "hipHostMalloc")
    with pytest.raises((KvhoistError, HostMemoryError), match="hipErrorOutOfMemory"):
        run_on_gpu(arm, 0, HostPid.FIND, POOL_BYTES, 1)


def test_bytes_that_change_on_the_device_fail_the_arm(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, hip: Any
) -> None:
    machine.start(REGISTERED)
    copy = RocmPlatform.copy

    def spoil(self: RocmPlatform, source: int, destination: int, num_bytes: int, stream: Any) -> None:
        if machine.products == 20 and machine.copies == 20:  # what arrived last is about to be fetched
            byte = ctypes.c_uint8.from_address(source + 12_345)
            hip.enqueue(stream, lambda: setattr(byte, "value", byte.value ^ 1))
        machine.copies += 1
        copy(self, source, destination, num_bytes, stream)

    monkeypatch.setattr(RocmPlatform, "copy", spoil)
    with pytest.raises(KvhoistError, match=r"got 1 wrong bytes .* the first at 12345, in iteration 20"):
        run_on_gpu(REGISTERED, 0, HostPid.FIND, POOL_BYTES, 1)


def test_a_gpu_that_another_process_uses_is_refused_before_memory_is_taken(machine: Machine, hip: Any) -> None:
    machine.start(REGISTERED)
    machine.others = [os.getpid() + 1]
    with pytest.raises(ConfigError, match="others use this GPU too"):
        run_on_gpu(REGISTERED, 0, HostPid.FIND, POOL_BYTES, 1)
    assert set(hip.live()) <= {"streams", "events"}
