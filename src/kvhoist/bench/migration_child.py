"""One arm of `kvhoist.bench.migration`: python -m kvhoist.bench.migration_child ARM WHERE POOL_BYTES ITERATIONS PID.

WHERE is the index of a GPU, or "simulated"; PID is "find" or "ask" (`kfd.HostPid`). The environment decides
whose the host memory is, when HIP starts. Prints a JSON object: what `migration_loop.measure` returns, and `device` and
`host_pid` for a GPU; or `refused`, the text of the error that says why it cannot run.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from kvhoist.bench.kfd import HostPid, find_process, processes
from kvhoist.bench.migration_kernel import LinuxKernel, SimulatedKernel
from kvhoist.bench.migration_loop import Rig, measure
from kvhoist.bench.numa import memory_nodes
from kvhoist.errors import ConfigError, KvhoistError
from kvhoist.platform.base import Device
from kvhoist.platform.cpu import CpuPlatform
from kvhoist.settings import Settings

REGISTERED, GTT = "registered", "gtt"
ENVIRONMENT = {
    REGISTERED: {"HSA_USERPTR_FOR_PAGED_MEM": "1"},
    GTT: {"HSA_USERPTR_FOR_PAGED_MEM": "0"},
}
"""What decides, before HIP starts, whose the pages of host memory are: this process's, or the driver's (GTT)."""

SIMULATED = "simulated"


def check_environment(arm: str) -> None:
    """Raise ConfigError where this process started with the other arm's environment."""
    if Settings.from_env().driver_owned_host_memory != (arm == GTT):
        raise ConfigError(
            f"the environment is not that of the arm {arm}",
            got=f"HSA_USERPTR_FOR_PAGED_MEM, which is {'not ' if arm == GTT else ''}0",
            expected=" ".join(f"{name}={value}" for name, value in ENVIRONMENT[arm].items()),
            remedy="Start it so, by: kvhoist bench migration",
        )


def run_on_gpu(arm: str, index: int, host_pid: HostPid, pool_bytes: int, iterations: int) -> dict[str, Any]:
    """Run an arm on AMD's GPU `index`. Raises KvhoistError where it cannot, or where bytes were wrong."""
    check_environment(arm)
    nodes = memory_nodes()
    before = processes()
    from kvhoist.bench.migration_torch import check_hip, products

    hip = check_hip()  # and torch's HIP runtime is the process's
    from kvhoist.platform.rocm import RocmPlatform

    platform = RocmPlatform(Device("cuda", index))
    platform.enter_thread()
    stream: Any = platform.make_stream()
    compute = products(index, stream.handle)
    process = find_process(before, host_pid)
    process.check_alone()
    rig = Rig(platform, stream, compute, LinuxKernel(nodes, process))
    answer = measure(rig, pool_bytes=pool_bytes, iterations=iterations)
    known = {"name": platform.driver.name, "gpu_arch": platform.capabilities.gpu_arch, "hip": hip}
    return {**answer, "host_pid": process.pid, "device": known}


def run_simulated(arm: str, pool_bytes: int, iterations: int) -> dict[str, Any]:
    """Run an arm with the CPU as the device, products of small matrices, and a simulated kernel that moves pages."""
    kernel = SimulatedKernel(driver_owned=arm == GTT)
    matrix: Any = np.ones((128, 128), dtype=np.float32)

    def compute() -> None:
        with kernel.queues():
            for _ in range(4):
                matrix @ matrix

    platform = CpuPlatform()
    rig = Rig(platform, platform.make_stream(), compute, kernel)
    return measure(rig, pool_bytes=pool_bytes, iterations=iterations)


def main() -> None:
    arm, where, pool_bytes, iterations, host_pid = sys.argv[1:]
    try:
        if where == SIMULATED:
            answer = run_simulated(arm, int(pool_bytes), int(iterations))
        else:
            answer = run_on_gpu(arm, int(where), HostPid(host_pid), int(pool_bytes), int(iterations))
    except KvhoistError as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
