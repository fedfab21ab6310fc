"""Measurements that need a process of their own, and what the kernel says of a process's memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvhoist.errors import KvhoistError

_NOTHING: Mapping[str, str] = MappingProxyType({})


def run_fresh(module: str, *arguments: object, environment: Mapping[str, str] = _NOTHING) -> dict[str, Any]:
    """Run `python -m module arguments` in a new process and return the JSON object on the last line of its output.

    `environment` is added to this process's. Raises KvhoistError, with the process's last words, where it fails.
    """
    variables = [f"{name}={value}" for name, value in environment.items()]
    command = ["env", *variables, sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["nothing on stderr"]
        raise KvhoistError(
            f"{module} {' '.join(map(str, arguments))} failed (exit code {done.returncode})", got=words[-1]
        )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def memory_bytes() -> dict[str, int]:
    """Return bytes of this process by the names of /proc/self/status: VmRSS (resident), VmLck (locked), VmPin (pinned
    by the kernel for devices), and the others there."""
    lines = (line.split() for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) == 3 and words[2] == "kB"}
