"""hipRTC, AMD's run-time compiler, by ctypes: the one that the process holds, or a wheel's, or an installation's."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from kvhoist.copy.rtc import Kind, RuntimeCompiler, first_of, mapped, read_maps, size_of
from kvhoist.errors import MissingDependencyError
from kvhoist.platform.rocm_library import rocm_folders

_SONAMES = ("libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so")
"""Of the ROCm releases whose interface is known, and what torch's wheels call theirs."""


class Hiprtc(RuntimeCompiler):
    """A loaded hipRTC. It does not tell which targets it knows. The compiler proper is a library beside it, which its
    own version need not follow: hence `build` tells that one's size too."""

    name = "hipRTC"
    prefix = "hiprtc"
    images: ClassVar[dict[Kind, str]] = {"hsaco": "Code"}

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        beside = sorted(Path(os.path.realpath(self.path)).parent.glob("libamd_comgr.so*")) if self.path else []
        self.build += "".join(f", {path.name} of {size_of(path)}" for path in beside[-1:])


@functools.cache
def load_hiprtc() -> Hiprtc:
    """Return the process's hipRTC: the one that is loaded, so that there is no second copy; else the one beside the HIP
    runtime that is loaded (torch's wheel brings both); else one in torch's wheel or ROCm's (`_rocm_sdk_*`), found
    without importing anything; else an installation's (ROCM_PATH, by default /opt/rocm), or the system loader's.

    Raises MissingDependencyError with the places looked at.
    """
    found, failures = first_of(_candidates(), Hiprtc)
    if found is not None:
        return found
    raise MissingDependencyError(
        "AMD's run-time compiler is not installed",
        got=", ".join([f"none in this process, none in {' or '.join(map(str, _folders())) or 'a wheel'}", *failures]),
        expected=" or ".join(_SONAMES),
        remedy="Install torch's ROCm build, whose wheel brings it, or ROCm's package hip-runtime-amd; "
        "set ROCM_PATH where ROCm is not in /opt/rocm.",
    )


def _candidates() -> Iterator[tuple[str, int]]:
    """Yield names or paths for the loader, with its mode, by preference."""
    for name in (*_SONAMES, *(path for path, _ in mapped("hiprtc", read_maps()))):
        yield name, os.RTLD_NOLOAD | os.RTLD_NOW
    for folder in _folders():
        for soname in _SONAMES:
            if (folder / soname).exists():
                yield str(folder / soname), ctypes.DEFAULT_MODE
    for soname in _SONAMES:
        yield soname, ctypes.DEFAULT_MODE


def _folders() -> list[Path]:
    """Return where a hipRTC may lie, by preference."""
    runtimes = [Path(path).parent for path, _ in mapped("amdhip64", read_maps())]
    return [*dict.fromkeys([*runtimes, *rocm_folders()])]
