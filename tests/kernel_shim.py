"""The relayout kernel as C++ on the CPU: the same source, with threads and blocks as loops."""

from __future__ import annotations

import ctypes
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
"""


def compiler() -> str | None:
    """Return a C++ compiler of this machine."""
    return next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def build(folder: Path, source: str | None = None) -> ctypes.CDLL:
    """Compile the kernel (or a changed `source` of it) into a library that loops over blocks and threads."""
    found = compiler()
    assert found is not None, "no C++ compiler"
    (folder / "relayout.cuh").write_text(SOURCE.read_text() if source is None else source)
    (folder / "shim.cpp").write_text(_SHIM)
    library = folder / "relayout.so"
    defines = [f"-D{name}={value}" for name, value in DEFINES.items()]
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", *defines]
    subprocess.run([found, *options, str(folder / "shim.cpp"), "-o", str(library)], check=True, timeout=120)
    return ctypes.CDLL(str(library))


def run(library: ctypes.CDLL, word_bytes: int, parameters: RelayoutParameters, grid: int, block: int) -> None:
    assert word_bytes in WORDS
    getattr(library, f"run_relayout{word_bytes}")(ctypes.byref(parameters), grid, block)
