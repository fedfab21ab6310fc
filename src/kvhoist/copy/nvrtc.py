"""NVRTC, NVIDIA's run-time compiler, through ctypes: the one that the process holds, or a package's, or the system's.

Interface and the order of its calls: https://docs.nvidia.com/cuda/nvrtc/. Neither a driver nor CUDA headers are needed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any, Literal

from kvhoist.errors import KvhoistError, MissingDependencyError

_log = logging.getLogger(__name__)

Kind = Literal["cubin", "ptx"]

_MAJORS = (13, 12)
"""CUDA majors that are asked for by soname; packages and the process may hold others."""

_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "nvrtcVersion": (POINTER(c_int), POINTER(c_int)),
    "nvrtcGetNumSupportedArchs": (POINTER(c_int),),
    "nvrtcGetSupportedArchs": (POINTER(c_int),),
    "nvrtcCreateProgram": (POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p),
    "nvrtcCompileProgram": (c_void_p, c_int, POINTER(c_char_p)),
    "nvrtcDestroyProgram": (POINTER(c_void_p),),
    "nvrtcGetProgramLogSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetProgramLog": (c_void_p, c_char_p),
    "nvrtcGetCUBINSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetCUBIN": (c_void_p, c_char_p),
    "nvrtcGetPTXSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetPTX": (c_void_p, c_char_p),
}
_GETTERS = {
    "log": ("nvrtcGetProgramLogSize", "nvrtcGetProgramLog"),
    "cubin": ("nvrtcGetCUBINSize", "nvrtcGetCUBIN"),
    "ptx": ("nvrtcGetPTXSize", "nvrtcGetPTX"),
}


class _DlInfo(ctypes.Structure):
    _fields_ = (("file", c_char_p), ("base", c_void_p), ("symbol", c_char_p), ("address", c_void_p))


class Nvrtc:
    """A loaded NVRTC. Thread-safe; calls release the GIL. Never unloaded.

    path: its file, "" where the loader does not tell.
    build: the version and the file's size, as no call tells one patch release from another.
    architectures: the numbers that it compiles for, ascending: 90 is compute capability 9.0.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises OSError where `library` is no NVRTC, or one older than CUDA 11.2."""
        self._library = library
        try:
            for name, types in _FUNCTIONS.items():
                getattr(library, name).argtypes = types
            library.nvrtcGetErrorString.restype = c_char_p
        except AttributeError as missing:
            raise OSError(f"not an NVRTC that can be used: {missing}") from missing
        major, minor, count = c_int(), c_int(), c_int()
        self._check("nvrtcVersion", major, minor)
        self._check("nvrtcGetNumSupportedArchs", count)
        numbers = (c_int * count.value)()
        if error := library.nvrtcGetSupportedArchs(numbers):
            raise OSError(f"nvrtcGetSupportedArchs: {self._words(error)}")
        self.architectures = tuple(sorted(numbers))
        self.path = _file_of(library.nvrtcVersion)
        self.build = f"{major.value}.{minor.value}, {_size_of(self.path)} bytes"

    def compile(self, source: str, *, name: str, options: Sequence[str], kind: Kind) -> bytes:
        """Compile `source`, called `name` in messages, and return its cubin, or its PTX with the NUL that the driver
        wants at the end. `options` name an architecture: an `sm_` for a cubin, a `compute_` for PTX.

        Raises KvhoistError with the compiler's log.
        """
        arguments = (c_char_p * len(options))(*(option.encode() for option in options))
        with self._program(source, name) as program:
            error = self._library.nvrtcCompileProgram(program, len(options), arguments)
            log = self._get("log", program).rstrip(b"\0").decode(errors="replace").strip()
            if error:
                raise KvhoistError(
                    f"{name} does not compile",
                    got=f"{self._words(error)} from NVRTC {self.build} with {' '.join(options)}",
                    expected="C++17 that includes nothing",
                    remedy=f"NVRTC's log:\n{log}",
                )
            if log:
                _log.debug("%s: %s", name, log)
            return self._get(kind, program)

    @contextmanager
    def _program(self, source: str, name: str) -> Iterator[c_void_p]:
        program = c_void_p()
        error = self._library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        if error:
            raise KvhoistError(f"NVRTC {self.build} takes no source", got=f"{self._words(error)} for {name}")
        try:
            yield program
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, what: str, program: c_void_p) -> bytes:
        get_size, get = _GETTERS[what]
        size = c_size_t()
        error = getattr(self._library, get_size)(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        error = error or getattr(self._library, get)(program, buffer)
        if error or (what != "log" and not size.value):
            raise KvhoistError(f"NVRTC {self.build} gives no {what}", got=self._words(error))
        return buffer.raw

    def _check(self, function: str, *results: c_int) -> None:
        if error := getattr(self._library, function)(*map(ctypes.byref, results)):
            raise OSError(f"{function}: {self._words(error)}")

    def _words(self, error: int) -> str:
        words: bytes = self._library.nvrtcGetErrorString(error)
        return words.decode()


@functools.cache
def load_nvrtc() -> Nvrtc:
    """Return the process's NVRTC: the one that is loaded (torch's), so that there is no second copy; else one in a
    Python package `nvidia/*/lib`, which is found without importing anything; else the system loader's. Of several, one
    of the CUDA runtime's major that the process holds comes first: a driver may refuse code of a later major.

    Takes 25 ms the first time with its file in the page cache. Raises MissingDependencyError with the places looked at.
    """
    failures = [f"none in this process, none in {' or '.join(_package_roots()) or 'a Python package'}"]
    for name, mode in _candidates():
        try:
            nvrtc = Nvrtc(ctypes.CDLL(name, mode))
        except OSError as error:
            if mode == ctypes.DEFAULT_MODE:
                failures.append(f"no {name} ({str(error).removeprefix(f'{name}: ')})")
        else:
            _log.info("NVRTC %s at %s", nvrtc.build, nvrtc.path or name)
            return nvrtc
    raise MissingDependencyError(
        "NVIDIA's run-time compiler is not installed",
        got=", ".join(failures),
        expected=f"libnvrtc.so.{' or .'.join(map(str, _MAJORS))}",
        remedy="Run: pip install nvidia-cuda-nvrtc (for a driver of CUDA 12: nvidia-cuda-nvrtc-cu12).",
    )


def _candidates() -> Iterator[tuple[str, int]]:
    """Yield names or paths for the loader, with its mode, by preference."""
    maps = _read_maps()
    runtimes = [major for _, major in _mapped("cudart", maps)]

    def rank(major: int) -> tuple[bool, int]:
        return major not in runtimes, -major

    sonames = [f"libnvrtc.so.{major}" for major in sorted({*_MAJORS, *runtimes}, key=rank)]
    # The maps show copies under other names, as wheels have that bundle theirs.
    mapped = [path for path, _ in sorted(_mapped("nvrtc", maps), key=lambda found: rank(found[1]))]
    for loaded in (*sonames, *mapped):
        yield loaded, os.RTLD_NOLOAD | os.RTLD_NOW
    packaged = [(str(path), int(path.suffix[1:])) for path in _packaged()]
    for path, _ in sorted(packaged, key=lambda found: rank(found[1])):
        yield path, ctypes.DEFAULT_MODE
    for soname in sonames:
        yield soname, ctypes.DEFAULT_MODE


def _read_maps() -> str:
    try:
        return Path("/proc/self/maps").read_text(errors="surrogateescape")
    except OSError:
        return ""


def _mapped(library: str, maps: str) -> list[tuple[str, int]]:
    """Return (path, major) of the copies of `library` in a text like /proc/self/maps, "nvrtc" for libnvrtc."""
    found = re.findall(rf"^[^/\n]*(/.*/lib{library}(?:-[0-9a-f]+)?\.so\.(\d+)[.\d]*)$", maps, re.MULTILINE)
    return [(path, int(major)) for path, major in dict.fromkeys(found)]


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


def _file_of(function: Callable[..., int]) -> str:
    info = _DlInfo()
    found = ctypes.CDLL(None).dladdr(ctypes.cast(function, c_void_p), ctypes.byref(info))  # type: ignore[arg-type]
    return os.fsdecode(info.file) if found and info.file else ""


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
