"""What the reader of a measurement must know: when, by which command, on which machine, on which GPU."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvhoist.platform.base import CPU, Device
from kvhoist.platform.gpu import GpuPlatform
from kvhoist.platform.open import open_platform
from kvhoist.system_files import text_of

_FOLDERS = re.compile(r"(?<![\w.])(?:~[\w-]*)?/+(?:[^\s/]+/+)*(?=[^\s/])")
"""The folders of an absolute path, inside of an argument: `--plot=/tmp/a.png`, `file:/data/kv`."""


def facts(device: Device = CPU) -> dict[str, Any]:
    """Return `date` (UTC), `command` and `machine`, and for a GPU `device`, as plain data for a benchmark's result.

    Raises ConfigError where there is no such GPU.
    """
    found = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(),
        "machine": machine(),
    }
    return found if device.type == CPU.type else {**found, "device": gpu(device)}


def machine() -> dict[str, Any]:
    """Return the processor, how many of its cores this process may use, how busy it is, and versions."""
    return {
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def cpu_model() -> str:
    """Return the processor's name; its architecture where the kernel tells no name."""
    lines = text_of("/proc/cpuinfo").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def gpu(device: Device) -> dict[str, Any]:
    """Return a GPU's name and what it is. Opens the device in this process, if nothing has done so. Raises ConfigError
    where there is no such GPU."""
    platform = open_platform(device)
    assert isinstance(platform, GpuPlatform)
    can = platform.capabilities
    found = {"compute_capability": list(can.compute_capability)} if can.compute_capability else {"target": can.gpu_arch}
    return {
        "name": platform.driver.name,
        **found,
        "multiprocessors": can.multiprocessors,
        "driver": platform.driver.releases(),
    }


def command(argv: Sequence[str] | None = None, module: str | None = None) -> str:
    """Return the command line `argv`, default this process's, quoted for a shell, less the folders of this machine.

    `module` is what `python -m` runs, if anything; default: what it runs in this process.
    """
    if argv is None:
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        argv, module = sys.argv, None if spec is None else str(spec.name)
    program = ["python", "-m", module.removesuffix(".__main__")] if module else [Path(argv[0]).name]
    if program == ["-c"]:  # a script that calls kvhoist.cli, as scripts/vllm-gpu-acceptance does
        program = ["kvhoist"]
    return shlex.join([*program, *map(_without_folders, argv[1:])])


def _without_folders(argument: str) -> str:
    whole = argument.startswith(("/", "~/"))  # a path alone, which may hold spaces
    return Path(argument).name or argument if whole else _FOLDERS.sub("", argument)
