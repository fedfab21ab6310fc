"""The relayout kernel as C++ on the CPU: the same source, with threads and blocks as loops. Either branch of it: that
for NVIDIA with any compiler, that for AMD (`rocm`) with ziglang's clang, which has the builtins that it uses."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from kvhoist.copy.relayout import SOURCE, RelayoutParameters
from kvhoist.copy.rounds import DEFINES, WORDS

SHIM = """
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


def compiler(*, rocm: bool = False) -> list[str] | None:
    """Return the command of a C++ compiler of this machine that can compile the branch."""
    if rocm:
        zig = [sys.executable, "-m", "ziglang", "cc", "-x", "c++", "-fno-sanitize=undefined", "-DUSE_ROCM=1"]
        return zig if importlib.util.find_spec("ziglang") else None
    return next(([found] for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def build(
    folder: Path,
    source: str | None = None,
    *,
    rocm: bool = False,
    defines: Mapping[str, int | str] = DEFINES,
    more: str = "",
) -> ctypes.CDLL:
    """Compile the kernel (or a changed `source` of it), and `more` C++ behind it, into a library that loops over blocks
    and threads. Raises CalledProcessError with the compiler's words in `stderr`."""
    command = compiler(rocm=rocm)
    assert command is not None, "no C++ compiler"
    (folder / "relayout.cuh").write_text(SOURCE.read_text() if source is None else source)
    (folder / "shim.cpp").write_text(SHIM + more)
    library = folder / "relayout.so"
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", *macros]
    ran = [*command, *options, str(folder / "shim.cpp"), "-o", str(library)]
    subprocess.run(ran, check=True, timeout=120, capture_output=True, text=True)
    return ctypes.CDLL(str(library))


def run(library: ctypes.CDLL, word_bytes: int, parameters: RelayoutParameters, grid: int, block: int) -> None:
    assert word_bytes in WORDS
    getattr(library, f"run_relayout{word_bytes}")(ctypes.byref(parameters), grid, block)
