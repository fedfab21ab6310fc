"""The HIP runtime of this process: the one that is loaded, else the one that torch would load, else an installation's.
Never a second copy."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import re
import sys
from pathlib import Path

from kvhoist.errors import ConfigError, MissingDependencyError
from kvhoist.settings import Settings

_log = logging.getLogger(__name__)

_SONAMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")

_CUDA_TORCH = "/libtorch_cuda.so"
_MAPPED = re.compile(r"/.*/libamdhip64(?:-[0-9a-f]+)?\.so[.\d]*$")


def loaded_hip() -> tuple[str, ...]:
    """Return the files of the HIP runtimes that this process holds. Wheels may bundle theirs under other names."""
    found = (_MAPPED.search(line) for line in _mapped() if "libamdhip64" in line)
    return tuple(dict.fromkeys(match[0] for match in found if match))


def holds_amd_gpus() -> bool:
    """Tell whether the GPUs of this process are AMD's: it holds a HIP runtime, which others than torch load too (UCX),
    and no torch for NVIDIA's."""
    return bool(loaded_hip()) and not any(_CUDA_TORCH in line for line in _mapped())


def _mapped() -> list[str]:
    try:
        return Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def rocm_folders() -> list[Path]:
    """Return where ROCm's libraries may lie, by preference: torch's wheel and ROCm's own (`_rocm_sdk_*`), both found
    without importing anything, an installation (ROCM_PATH, by default /opt/rocm)."""
    wheels = [lib for entry in sys.path for lib in sorted(Path(entry).glob("_rocm_sdk_*/lib"))]
    return [*_torch_folder(), *wheels, Settings.from_env().rocm_path / "lib"]


def load_hip() -> ctypes.CDLL:
    """Return the process's HIP runtime: a second one would have streams, events and registrations of its own.

    Raises ConfigError where the process holds several, MissingDependencyError with what was tried where there is none.
    """
    loaded = loaded_hip()
    if len(loaded) > 1:
        raise ConfigError(
            "this process holds several HIP runtimes, each with memory and streams of its own",
            got=", ".join(loaded),
            expected="one",
            remedy="Keep LD_LIBRARY_PATH and LD_PRELOAD from bringing a second one beside torch's.",
        )
    failures = []
    for name, mode in [(path, os.RTLD_NOLOAD | os.RTLD_NOW) for path in loaded] or _not_loaded():
        try:
            library = ctypes.CDLL(name, mode)
        except OSError as error:
            failures.append(str(error) if name in str(error) else f"{name}: {error}")
        else:
            _log.info("HIP runtime %s", name)
            return library
    raise MissingDependencyError(
        "AMD's HIP runtime is not installed",
        got="; ".join(failures),
        expected=" or ".join(_SONAMES),
        remedy="Install torch for ROCm, which brings it, or ROCm 6 or later (ROCM_PATH where it is not in /opt/rocm), "
        "or keep KV tensors on the CPU.",
    )


def _not_loaded() -> list[tuple[str, int]]:
    """Return paths and names for the loader, with its mode."""
    files = [folder / name for folder in rocm_folders() for name in _SONAMES]
    return [(name, os.RTLD_NOW) for name in (*(str(file) for file in files if file.exists()), *_SONAMES)]


def _torch_folder() -> list[Path]:
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):  # ValueError: a module of that name without a spec
        return []
    return [Path(place) / "lib" for place in spec.submodule_search_locations or ()] if spec else []
