"""What was measured on: GPUs, HIP runtime, hipRTC, drivers, memory; and the kernels' machine code."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path

import rocm_isa

import kvhoist
from kvhoist.copy.hiprtc import load_hiprtc
from kvhoist.copy.jit import compile_kernels
from kvhoist.copy.relayout import NAME, SOURCE
from kvhoist.copy.rounds import DEFINES
from kvhoist.errors import DeviceError, KvhoistError
from kvhoist.platform.base import Device
from kvhoist.platform.rocm_driver import RocmDriver
from kvhoist.platform.rocm_library import loaded_hip
from kvhoist.settings import Settings
from rocm_acceptance.target import DEVICE, Row, Target

_KFD, _KFD_GET_VERSION = Path("/dev/kfd"), 0x80084B01
"""AMDKFD_IOC_GET_VERSION of the kernel's linux/kfd_ioctl.h."""

_FILES = {
    "ROCm": ".info/version",
    "NUMA nodes with memory": "/sys/devices/system/node/has_memory",
    "NUMA balancing": "/proc/sys/kernel/numa_balancing",
    "transparent huge pages": "/sys/kernel/mm/transparent_hugepage/enabled",
}


def run(target: Target) -> Iterator[Row]:
    """Yield facts, one a row: first what needs no runtime. The GPUs and the kernels' compilation have verdicts."""
    yield _fact("kvhoist", kvhoist.__version__)
    yield _fact("KFD", _kfd_version())
    for what, path in _FILES.items():
        yield _fact(what, _text(Settings.from_env().rocm_path / path))
    for path in sorted(Path("/sys/class/drm").glob("card*/device/mem_info_gtt_total")):
        yield _fact(f"GTT of {path.parts[4]}, bytes", _text(path))
        speed, width = (_text(path.with_name(f"current_link_{name}")) for name in ("speed", "width"))
        yield _fact(f"link of {path.parts[4]}", f"{speed} x{width}")
    yield _fact("HSA_USERPTR_FOR_PAGED_MEM", os.environ.get("HSA_USERPTR_FOR_PAGED_MEM", "not set"))
    yield _fact("kernel", platform.release())
    yield _fact("torch", _torch())
    opened = target.open()
    yield _fact("runtime", ", ".join(Path(path).name for path in loaded_hip()))
    yield _fact("drivers", opened.driver.releases())
    yield _fact("batch memcpy", "yes" if opened.driver.has_batch_copies else "no: one copy a page")
    yield from _gpus()
    yield from _compiled(target, opened.capabilities.gpu_arch)


def isa(target: Target) -> Iterator[Row]:
    """Yield the kernels as this repository's clang compiles them for each target, with what is not as it is meant."""
    if not rocm_isa.is_installed():
        yield {"skipped": "ziglang is not installed: pip install ziglang"}
        return
    for one in rocm_isa.inspected():
        problems = one.problems()
        what = {"kernel": f"relayout{one.word_bytes}", "target": one.target}
        yield {**what, **one.facts, "problems": problems, "pass": not problems}


def _gpus() -> Iterator[Row]:
    index = 0
    while True:
        try:
            driver = RocmDriver(index)
        except DeviceError:
            return
        mine = " (measured)" if Device("cuda", index) == DEVICE else ""
        text = f"{driver.name}, {driver.gpu_arch}, {driver.num_multiprocessors} compute units{mine}"
        yield {**_fact(f"GPU {index}", text), "pass": True}
        index += 1


def _compiled(target: Target, gpu_arch: str) -> Iterator[Row]:
    if target.is_simulated:
        yield _fact("hipRTC", "none: the simulated runtime has the kernels as C++ for the CPU")
        return
    try:
        compiler = load_hiprtc()
        made = compile_kernels(SOURCE.read_text(), name=NAME, gpu_arch=gpu_arch, defines=DEFINES)
    except KvhoistError as error:
        yield {**_fact("hipRTC", str(error)), "pass": False}
        return
    yield _fact("hipRTC", compiler.build)
    yield {**_fact("kernels", f"{len(made.image)} B for {made.arch}, compiled in {made.seconds:.2f} s"), "pass": True}


def _kfd_version() -> str:
    try:
        with _KFD.open("rb") as device:
            return "{}.{}".format(*struct.unpack("II", fcntl.ioctl(device, _KFD_GET_VERSION, bytes(8))))
    except OSError as error:
        return f"unknown: {error}"


def _torch() -> str:
    """Return its version as the wheel has it: "2.9.0+rocm7.0"."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return "unknown"


def _fact(what: str, found: str) -> Row:
    return {"what": what, "found": found}
