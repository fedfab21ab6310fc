"""What NVRTC and hipRTC have in common: the life of a program, its log, and how the process's own copy is found.

hipRTC's functions are NVRTC's under another prefix: https://docs.nvidia.com/cuda/nvrtc/ and
https://rocm.docs.amd.com/projects/HIP/en/latest/how-to/hip_rtc.html. Neither needs a driver, a GPU or headers.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from kvhoist.errors import KvhoistError

_log = logging.getLogger(__name__)

Kind = Literal["cubin", "ptx", "hsaco"]

_LOG = "ProgramLog"
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "Version": (POINTER(c_int), POINTER(c_int)),
    "CreateProgram": (POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p),
    "CompileProgram": (c_void_p, c_int, POINTER(c_char_p)),
    "DestroyProgram": (POINTER(c_void_p),),
}


class _DlInfo(ctypes.Structure):
    _fields_ = (("file", c_char_p), ("base", c_void_p), ("symbol", c_char_p), ("address", c_void_p))


class RuntimeCompiler:
    """A loaded run-time compiler. Thread-safe; calls release the GIL. Never unloaded.

    name: what its vendor calls it.
    path: its file, "" where the loader does not tell.
    build: the version and the file's size, as no call tells one patch release from another.
    """

    name: ClassVar[str]
    prefix: ClassVar[str]
    images: ClassVar[Mapping[Kind, str]]  # what its functions call each kind of image

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises OSError where `library` is no such compiler, or one too old."""
        self._library = library
        getters = {f"Get{what}": (c_void_p, c_char_p) for what in (_LOG, *self.images.values())}
        sizes = {f"{getter}Size": (c_void_p, POINTER(c_size_t)) for getter in getters}
        self._bind({**_FUNCTIONS, **getters, **sizes})
        major, minor = c_int(), c_int()
        self._check("Version", major, minor)
        self.path = _file_of(self._function("Version"))
        self.build = f"{major.value}.{minor.value}, {size_of(self.path)} bytes"

    def compile(self, source: str, *, name: str, options: Sequence[str], kind: Kind) -> bytes:
        """Compile `source`, called `name` in messages, and return its image of a `kind` that fits the architecture in
        `options`; PTX with the NUL that the driver wants at its end.

        Raises KvhoistError with the compiler's log.
        """
        arguments = (c_char_p * len(options))(*(option.encode() for option in options))
        with self._program(source, name) as program:
            error = self._function("CompileProgram")(program, len(options), arguments)
            log = self._get(_LOG, program).rstrip(b"\0").decode(errors="replace").strip()
            if error:
                raise KvhoistError(
                    f"{name} does not compile",
                    got=f"{self._words(error)} from {self.name} {self.build} with {' '.join(options)}",
                    expected="C++17 that includes nothing",
                    remedy=f"{self.name}'s log:\n{log}",
                )
            if log:
                _log.debug("%s: %s", name, log)
            return self._get(self.images[kind], program)

    @contextmanager
    def _program(self, source: str, name: str) -> Iterator[c_void_p]:
        program = c_void_p()
        create = self._function("CreateProgram")
        error = create(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        if error:
            raise KvhoistError(f"{self.name} {self.build} takes no source", got=f"{self._words(error)} for {name}")
        try:
            yield program
        finally:
            self._function("DestroyProgram")(ctypes.byref(program))

    def _get(self, what: str, program: c_void_p) -> bytes:
        size = c_size_t()
        error = self._function(f"Get{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        error = error or self._function(f"Get{what}")(program, buffer)
        if error or (what != _LOG and not size.value):
            raise KvhoistError(f"{self.name} {self.build} gives no {what}", got=self._words(error))
        return buffer.raw

    def _bind(self, functions: Mapping[str, tuple[Any, ...]]) -> None:
        try:
            for function, types in functions.items():
                self._function(function).argtypes = types
            self._function("GetErrorString").restype = c_char_p
        except AttributeError as missing:
            raise OSError(f"no {self.name} that can be used: {missing}") from missing

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"{self.prefix}{name}")

    def _check(self, function: str, *results: Any) -> None:
        if error := self._function(function)(*map(ctypes.byref, results)):
            raise OSError(f"{self.prefix}{function}: {self._words(error)}")

    def _words(self, error: int) -> str:
        words: bytes = self._function("GetErrorString")(error)
        return words.decode()


C = TypeVar("C", bound=RuntimeCompiler)


def first_of(candidates: Iterable[tuple[str, int]], make: Callable[[ctypes.CDLL], C]) -> tuple[C | None, list[str]]:
    """Return the compiler that `make` makes of the first library that loads and serves, and why others did not, as far
    as they were not only looked for in the process. Candidates are names or paths for the loader, with its mode."""
    failures: list[str] = []
    for name, mode in candidates:
        try:
            found = make(ctypes.CDLL(name, mode))
        except OSError as error:
            if mode == ctypes.DEFAULT_MODE:
                failures.append(f"no {name} ({str(error).removeprefix(f'{name}: ')})")
        else:
            _log.info("%s %s at %s", found.name, found.build, found.path or name)
            return found, failures
    return None, failures


def read_maps() -> str:
    """Return what the process has mapped, as Linux tells it; "" where nobody tells."""
    try:
        return Path("/proc/self/maps").read_text(errors="surrogateescape")
    except OSError:
        return ""


def mapped(library: str, maps: str) -> list[tuple[str, int]]:
    """Return (path, major) of the copies of `library` in a text like /proc/self/maps, "nvrtc" for libnvrtc; 0 for a
    file without a version."""
    found = re.findall(rf"^[^/\n]*(/.*/lib{library}(?:-[0-9a-f]+)?\.so(?:\.(\d+)[.\d]*)?)$", maps, re.MULTILINE)
    return [(path, int(major or 0)) for path, major in dict.fromkeys(found)]


def size_of(path: str | Path) -> int:
    """Return a file's bytes; 0 where it cannot be asked."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _file_of(function: Any) -> str:
    info = _DlInfo()
    found = ctypes.CDLL(None).dladdr(ctypes.cast(function, c_void_p), ctypes.byref(info))
    return os.fsdecode(info.file) if found and info.file else ""
