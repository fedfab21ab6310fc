"""The simulated HIP runtime (`sim.h` says what it is), compiled and loaded, and what tests ask of it."""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_shim
import numpy as np

from kvhoist.copy.rounds import DEFINES
from kvhoist.device_layout import DeviceCache
from kvhoist.platform.base import CPU, MemoryRegion, Platform
from kvhoist.platform.cpu import host_view
from kvhoist.platform.gpu import GpuPlatform

OUT_OF_MEMORY, ILLEGAL_ADDRESS, NOT_SUPPORTED = 2, 700, 801
ARCH = "gfx942"
KINDS = ("allocations", "events", "host allocations", "modules", "registrations", "streams")

_FOLDER = Path(__file__).parent
_RUNTIME, _CODE_OBJECT = "libamdhip64.so", "relayout.co"
_SOURCES = ("devices.c", "faults.c", "memory.c", "streams.c")
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


_REPORTING = {
    "g++": ["--param=asan-instrumentation-with-call-threshold=0", "--param=asan-stack=0", "--param=asan-globals=0"],
    "clang": [
        *("-mllvm", "-asan-instrumentation-with-call-threshold=0"),
        *("-mllvm", "-asan-stack=0", "-mllvm", "-asan-globals=0"),
    ],
}
"""Options that make a compiler call a function before each access, as address sanitizers for kernels want it."""


def build_code_object(folder: Path) -> Path:
    """Compile the kernels of the repository into a library whose every access is reported to the simulator."""
    found = kernel_shim.compiler()
    assert found is not None, "no C++ compiler"
    (folder / "relayout.cuh").write_text(kernel_shim.SOURCE.read_text())
    more = 'extern "C" const unsigned long hipsim_parameter_bytes = sizeof(Relayout);\n'
    (folder / "shim.cpp").write_text(kernel_shim.SHIM + more)
    library, accesses = folder / _CODE_OBJECT, folder / "accesses.o"
    macros = [f"-D{name}={value}" for name, value in DEFINES.items()]
    reporting = _REPORTING["clang" if "clang" in Path(os.path.realpath(found[0])).name else "g++"]
    options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", *macros]
    # The index variables lie in thread-local memory, which then is part of a thread's stack.
    options += ["-fsanitize=kernel-address", *reporting, "-ftls-model=initial-exec", "-Wl,-Bsymbolic"]
    _run([*found, "-x", "c", "-O2", "-fPIC", "-c", str(_FOLDER / "accesses.c"), "-o", str(accesses)])
    _run([*found, *options, str(folder / "shim.cpp"), str(accesses), "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=120)


def build(folder: Path) -> None:
    """Compile the runtime and the kernels for it into `folder`."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler is not None, "no C compiler"
    options = ["-std=gnu11", "-O2", "-g", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    sources = [str(_FOLDER / name) for name in _SOURCES]
    _run([compiler, *options, *sources, "-o", str(folder / _RUNTIME), "-lpthread", "-ldl"])
    build_code_object(folder)


class Simulator:
    """What `build` made in a folder, loaded: from here on this process holds a HIP runtime, until its end."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / _RUNTIME
        self.library = ctypes.CDLL(str(self.path))
        self.library.hipsim_live.restype = self.library.hipsim_calls.restype = ctypes.c_long
        self.library.hipsim_message.restype = ctypes.c_char_p
        self.library.hipsim_pause.argtypes = (ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint)
        self.library.hipsim_fail.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_int)
        self.library.hipLaunchHostFunc.argtypes = (ctypes.c_void_p, _HOST_FUNCTION, ctypes.c_void_p)
        self.image = self.image_of(folder / _CODE_OBJECT)
        self._calls: dict[int, Any] = {}
        self.repair()

    @staticmethod
    def image_of(library: Path, arch: str = ARCH) -> bytes:
        """Return the code object of kernels that `build_code_object` compiled."""
        return f"hipsim {arch} {library}".encode()

    def repair(self) -> None:
        """Undo all that tests have told it."""
        self.library.hipsim_repair()
        self.set_arch(f"{ARCH}:sramecc+:xnack-")
        self.pause(seed=1, longest_us=100, one_in=4)

    def pause(self, *, seed: int, longest_us: int, one_in: int) -> None:
        """Let one piece of a stream's work in `one_in` begin late. Streams take the seed when they are made."""
        self.library.hipsim_pause(seed, longest_us, one_in)

    def set_arch(self, name: str) -> None:
        self.library.hipsim_set_arch(name.encode())

    def fail(self, call: str, *, after: int = 0, code: int = OUT_OF_MEMORY) -> None:
        """Let call number `after` from now on answer `code`, once."""
        assert self.library.hipsim_fail(call.encode(), after, code) == 0

    @property
    def num_pending(self) -> int:
        """How many failures no call has come to yet."""
        return int(self.library.hipsim_pending())

    def break_device(self, code: int = ILLEGAL_ADDRESS) -> None:
        self.library.hipsim_break(code)

    @property
    def message(self) -> str:
        """Why the device broke; "" where it did not."""
        text: bytes = self.library.hipsim_message()
        return text.decode()

    def calls(self, name: str) -> int:
        return int(self.library.hipsim_calls(name.encode()))

    def last_error(self) -> int:
        """Return what the calling thread's next reader would find, and forget it."""
        return int(self.library.hipGetLastError())

    def live(self) -> dict[str, int]:
        """Return what was made and not given back, by kind."""
        counts = {kind: int(self.library.hipsim_live(kind.encode())) for kind in KINDS}
        return {kind: count for kind, count in counts.items() if count}

    def enqueue(self, stream: Any, work: Callable[[], object]) -> None:
        """Let `stream` call `work` when it comes to it."""

        def call(_: int) -> None:
            work()
            del self._calls[key]

        function = _HOST_FUNCTION(call)
        key = id(function)
        self._calls[key] = function
        assert self.library.hipLaunchHostFunc(stream.handle, function, None) == 0


@functools.cache
def simulator() -> Simulator:
    """Return the process's simulator, compiled on first use."""
    folder = Path(tempfile.mkdtemp(prefix="kvhoist-hip-"))
    atexit.register(shutil.rmtree, folder)
    build(folder)
    return Simulator(folder)


def device_array(platform: Platform, shape: tuple[int, ...], dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
    """Return an array in simulated device memory, which the test's own code may look into."""
    region = platform.allocate(math.prod(shape) * np.dtype(dtype).itemsize)
    return host_view(region).view(dtype).reshape(shape)


def on_device(cache: DeviceCache, platform: GpuPlatform) -> DeviceCache:
    """Return a cache that was read off such arrays as the device's."""
    buffers = tuple(MemoryRegion(r.address, r.num_bytes, platform.device, r.owner) for r in cache.buffers)
    assert cache.device == CPU
    return replace(cache, buffers=buffers, device=platform.device)


def in_thread(work: Callable[[], object], timeout_s: float = 30) -> None:
    """Do `work` in a thread of its own, and raise what it raised."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(timeout_s)
