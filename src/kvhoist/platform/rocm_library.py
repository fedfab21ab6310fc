"""The HIP runtime of this process: the one that is loaded (torch's), else the system loader's. Never a second copy."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from pathlib import Path

from kvhoist.errors import ConfigError, MissingDependencyError

_log = logging.getLogger(__name__)

_SONAMES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")

_MAPPED = re.compile(r"/.*/libamdhip64(?:-[0-9a-f]+)?\.so[.\d]*$")


def loaded_hip() -> tuple[str, ...]:
    """Return the files of the HIP runtimes that this process holds. Wheels may bundle theirs under other names."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
    except OSError:
        return ()
    found = (_MAPPED.search(line) for line in maps.splitlines() if "libamdhip64" in line)
    return tuple(dict.fromkeys(match[0] for match in found if match))


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
    for name, mode in [(path, os.RTLD_NOLOAD | os.RTLD_NOW) for path in loaded] or [(n, os.RTLD_NOW) for n in _SONAMES]:
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
        remedy="Install torch for ROCm, which brings it, or ROCm 6 or later; or keep KV tensors on the CPU.",
    )
