"""The relayout kernel as C++ on the CPU: the same source, with threads and blocks as loops.

`build` makes a library to call; `build_code_object` one for the simulated HIP runtime, which looks at every access.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from kvhoist.copy.relayout import SOURCE, RelayoutParameters
from kvhoist.copy.rounds import DEFINES, WORDS

_SHIM = """
#define KVHOIST_CPU
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(threads)
struct Index { unsigned int x; };
static thread_local Index blockIdx, threadIdx, blockDim, gridDim;
#include "relayout.cuh"
#define LOOP(name) \\
    extern "C" void run_##name(const Relayout* p, unsigned int grid, unsigned int block) { \\
        gridDim.x = grid; blockDim.x = block; \\
        for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) \\
            for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) name(*p); \\
    }
LOOP(relayout16) LOOP(relayout8) LOOP(relayout4)
extern "C" const unsigned long hipsim_parameter_bytes = sizeof(Relayout);
"""

_ACCESSES = Path(__file__).parent / "hip_simulator" / "accesses.c"
_REPORTING = {
    "g++": ["--param=asan-instrumentation-with-call-threshold=0", "--param=asan-stack=0", "--param=asan-globals=0"],
    "clang": [
        *("-mllvm", "-asan-instrumentation-with-call-threshold=0"),
        *("-mllvm", "-asan-stack=0", "-mllvm", "-asan-globals=0"),
    ],
}
"""Options that make a compiler call a function before each access, as address sanitizers for kernels want it."""


def compiler() -> str | None:
    """Return a C++ compiler of this machine."""
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def build(folder: Path, source: str | None = None) -> ctypes.CDLL:
    """Compile the kernel (or a changed `source` of it) into a library that loops over blocks and threads."""
    library = folder / "relayout.so"
    _compile(folder, source, library, ["-O1"])
    return ctypes.CDLL(str(library))


def build_code_object(folder: Path, source: str | None = None) -> Path:
    """As `build`, with every access reported to whoever calls `hipsim_bind`."""
    found = compiler()
    assert found is not None, "no C++ compiler"
    reporting = _REPORTING["clang" if "clang" in Path(os.path.realpath(found)).name else "g++"]
    library, accesses = folder / "relayout.co", folder / "accesses.o"
    # The index variables lie in thread-local memory, which then is part of a thread's stack.
    options = ["-O2", "-fsanitize=kernel-address", *reporting, "-ftls-model=initial-exec", "-Wl,-Bsymbolic"]
    _run([found, "-x", "c", "-O2", "-fPIC", "-c", str(_ACCESSES), "-o", str(accesses)])
    _compile(folder, source, library, [*options, str(accesses)])
    return library


def _compile(folder: Path, source: str | None, library: Path, options: list[str]) -> None:
    found = compiler()
    assert found is not None, "no C++ compiler"
    (folder / "relayout.cuh").write_text(SOURCE.read_text() if source is None else source)
    (folder / "shim.cpp").write_text(_SHIM)
    defines = [f"-D{name}={value}" for name, value in DEFINES.items()]
    common = ["-std=c++17", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", *defines]
    _run([found, *common, str(folder / "shim.cpp"), *options, "-o", str(library)])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=120)


def run(library: ctypes.CDLL, word_bytes: int, parameters: RelayoutParameters, grid: int, block: int) -> None:
    assert word_bytes in WORDS
    getattr(library, f"run_relayout{word_bytes}")(ctypes.byref(parameters), grid, block)
