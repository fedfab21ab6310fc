"""Kernels compiled at run time for the device at hand, by NVRTC or hipRTC: no nvcc, no ninja, no headers, no GPU."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from kvhoist.checks import count
from kvhoist.copy.code_cache import CodeCache, code_key
from kvhoist.copy.hiprtc import load_hiprtc
from kvhoist.copy.nvrtc import load_nvrtc
from kvhoist.copy.rtc import Kind
from kvhoist.errors import ConfigError, KvhoistError

_log = logging.getLogger(__name__)

GPU_ARCHS = ("gfx90a", "gfx942", "gfx950")
"""AMD's targets that the kernels' machine code was checked for (docs/rocm.md): MI200, MI300 and MI350 series."""

_GPU_ARCH = re.compile(r"gfx[0-9a-f]{3,4}(:\w+[+-])*", re.ASCII)
_MACRO = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NOTHING: Mapping[str, int | str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """A code object for `Platform.load_module`."""

    image: bytes  # a cubin; PTX, NUL at its end, where NVRTC does not know the device's architecture; AMD's hsaco
    kind: Kind
    arch: str  # "sm_90" of a cubin, "compute_90" of PTX, "gfx942" of an hsaco
    seconds: float  # that the compiler took; 0.0 from the cache


class _Compiler(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def build(self) -> str: ...

    def compile(self, source: str, *, name: str, options: Sequence[str], kind: Kind) -> bytes: ...


class _Job(NamedTuple):
    """Who compiles for a device, to what, with which options beside the macros."""

    compiler: _Compiler
    kind: Kind
    arch: str
    options: tuple[str, ...]


def compile_kernels(
    source: str,
    *,
    name: str,
    compute_capability: tuple[int, int] | None = None,
    gpu_arch: str = "",
    defines: Mapping[str, int | str] = _NOTHING,
    cache: CodeCache | None = None,
) -> CompiledKernels:
    """Compile C++17 `source` that includes nothing, with `defines` as macros, for an NVIDIA device of
    `compute_capability`, (9, 0) for an H200, or for AMD's target `gpu_arch`, "gfx942" for an MI300X, where USE_ROCM is
    defined too. 0.1 to 0.3 s, or what `cache` holds of the same source, options, name and compiler. NVRTC takes
    functions as `__device__` unless marked otherwise; `name` stands for the source in messages. Thread-safe.

    An architecture that NVRTC does not know gets PTX of the closest below, which the driver compiles when it loads it;
    only a driver at least as new as that NVRTC can.

    Raises ConfigError for an argument that cannot work, a device older than all that NVRTC knows, or a target that
    hipRTC does not know; KvhoistError with the compiler's log for source that does not compile; MissingDependencyError
    where the compiler is not there.
    """
    macros = _macro_options(defines)
    for what, text in (("source", source), ("name", name)):
        _check_text(what, text)
    compiler, kind, arch, options = _for_amd(gpu_arch) if gpu_arch else _for_nvidia(compute_capability)
    options = (*options, *macros)
    key = code_key(source=source, name=name, options=options, compiler=f"{compiler.name} {compiler.build}")
    image = cache.load(key) if cache else None
    if image is not None:
        return CompiledKernels(image, kind, arch, 0.0)
    began = time.perf_counter()
    try:
        image = compiler.compile(source, name=name, options=options, kind=kind)
    except KvhoistError as error:
        if not gpu_arch or gpu_arch.split(":")[0] in GPU_ARCHS:
            raise
        # That it does not know a target hipRTC tells in its log only.
        what = "the kernels do not compile for this target"
        raise ConfigError(what, got=gpu_arch, choices=GPU_ARCHS, remedy=f"What failed: {error}") from error
    seconds = time.perf_counter() - began
    _log.info("compiled %s for %s in %.3f s", name, arch, seconds)
    if cache:
        cache.store(key, image)
    return CompiledKernels(image, kind, arch, seconds)


def _for_nvidia(compute_capability: tuple[int, int] | None) -> _Job:
    if compute_capability is None:
        raise ConfigError("no device to compile for", expected="a compute capability, or a target such as gfx942")
    number = _arch_number(compute_capability)
    nvrtc = load_nvrtc()
    kind, arch = _target(number, nvrtc.architectures)
    # Else a file in the working folder is code that no key covers.
    options = ("-std=c++17", f"--gpu-architecture={arch}", "-default-device", "--no-source-include")
    return _Job(nvrtc, kind, arch, options)


def _for_amd(gpu_arch: str) -> _Job:
    if not _GPU_ARCH.fullmatch(gpu_arch):
        raise ConfigError("no such target of AMD's", got=repr(gpu_arch), choices=GPU_ARCHS)
    options = ("-std=c++17", f"--offload-arch={gpu_arch}", "-O3", "-DUSE_ROCM=1")
    return _Job(load_hiprtc(), "hsaco", gpu_arch, options)


def _target(number: int, known: Sequence[int]) -> tuple[Kind, str]:
    """Return what to compile to for architecture `number` with a compiler that knows the architectures `known`."""
    if number in known:
        return "cubin", f"sm_{number}"
    below = [other for other in known if other < number]
    if not below:
        raise ConfigError(
            "this NVRTC compiles for newer devices only",
            got=f"compute capability {number // 10}.{number % 10}",
            choices=[f"{other // 10}.{other % 10}" for other in known],
            remedy="Install an older one, such as nvidia-cuda-nvrtc-cu12, or use a newer device.",
        )
    return "ptx", f"compute_{max(below)}"


def _arch_number(compute_capability: tuple[int, int]) -> int:
    major, minor = compute_capability
    return 10 * count("compute_capability[0]", major, least=1) + count("compute_capability[1]", minor, most=9)


def _macro_options(defines: Mapping[str, int | str]) -> list[str]:
    """Return an option a macro, by name: the order in which they were given is not part of a key."""
    for name, value in defines.items():
        if not _MACRO.fullmatch(name):
            raise ConfigError("a macro cannot be called that", got=repr(name), expected="a C identifier")
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ConfigError(f"macro {name} has no value that C knows", got=repr(value), expected="an int or text")
        _check_text(f"macro {name}", str(value))
    return [f"-D{name}={defines[name]}" for name in sorted(defines)]


def _check_text(what: str, text: str) -> None:
    """Raise ConfigError where NVRTC would see another text: it reads UTF-8 up to the first NUL."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the {what} cannot be UTF-8", got=error, expected="text without lone surrogates") from error
    if b"\0" in data:
        raise ConfigError(f"the {what} ends early", got=f"a NUL at byte {data.index(0)}", expected="text without NUL")
