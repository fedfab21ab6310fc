"""NVRTC, NVIDIA's run-time compiler, by ctypes: the one that the process holds, or a package's, or the system's."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator
from ctypes import POINTER, c_int
from pathlib import Path
from typing import ClassVar

from kvhoist.copy.rtc import Kind, RuntimeCompiler, first_of, mapped, read_maps
from kvhoist.errors import MissingDependencyError

_MAJORS = (13, 12)
"""CUDA majors that are asked for by soname; packages and the process may hold others."""


class Nvrtc(RuntimeCompiler):
    """A loaded NVRTC of CUDA 11.2 or later.

    architectures: the numbers that it compiles for, ascending: 90 is compute capability 9.0. Options name one, as `sm_`
        for a cubin, as `compute_` for PTX.
    """

    name = "NVRTC"
    prefix = "nvrtc"
    images: ClassVar[dict[Kind, str]] = {"cubin": "CUBIN", "ptx": "PTX"}

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._bind({"GetNumSupportedArchs": (POINTER(c_int),), "GetSupportedArchs": ()})
        count = c_int()
        self._check("GetNumSupportedArchs", count)
        numbers = (c_int * count.value)()
        self._check("GetSupportedArchs", numbers)
        self.architectures = tuple(sorted(numbers))


@functools.cache
def load_nvrtc() -> Nvrtc:
    """Return the process's NVRTC: the one that is loaded (torch's), so that there is no second copy; else one in a
    Python package `nvidia/*/lib`, which is found without importing anything; else the system loader's. Of several, one
    of the CUDA runtime's major that the process holds comes first: a driver may refuse code of a later major.

    Takes 25 ms the first time with its file in the page cache. Raises MissingDependencyError with the places looked at.
    """
    found, failures = first_of(_candidates(), Nvrtc)
    if found is not None:
        return found
    looked = f"none in this process, none in {' or '.join(_package_roots()) or 'a Python package'}"
    raise MissingDependencyError(
        "NVIDIA's run-time compiler is not installed",
        got=", ".join([looked, *failures]),
        expected=f"libnvrtc.so.{' or .'.join(map(str, _MAJORS))}",
        remedy="Run: pip install nvidia-cuda-nvrtc (for a driver of CUDA 12: nvidia-cuda-nvrtc-cu12).",
    )


def _candidates() -> Iterator[tuple[str, int]]:
    """Yield names or paths for the loader, with its mode, by preference."""
    maps = read_maps()
    runtimes = [major for _, major in mapped("cudart", maps)]

    def rank(major: int) -> tuple[bool, int]:
        return major not in runtimes, -major

    sonames = [f"libnvrtc.so.{major}" for major in sorted({*_MAJORS, *runtimes}, key=rank)]
    # The maps show copies under other names, as wheels have that bundle theirs.
    loaded = [path for path, _ in sorted(mapped("nvrtc", maps), key=lambda found: rank(found[1]))]
    for name in (*sonames, *loaded):
        yield name, os.RTLD_NOLOAD | os.RTLD_NOW
    packaged = [(str(path), int(path.suffix[1:])) for path in _packaged()]
    for path, _ in sorted(packaged, key=lambda found: rank(found[1])):
        yield path, ctypes.DEFAULT_MODE
    for soname in sonames:
        yield soname, ctypes.DEFAULT_MODE


def _package_roots() -> list[str]:
    """Return the folders of the namespace package that NVIDIA's wheels share."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):  # ValueError: a module of that name without a spec
        return []
    return list(spec.submodule_search_locations or ()) if spec else []


def _packaged() -> list[Path]:
    files = [path for root in _package_roots() for path in Path(root).glob("*/lib/libnvrtc.so.*")]
    return [path for path in files if path.suffix[1:].isdecimal()]
