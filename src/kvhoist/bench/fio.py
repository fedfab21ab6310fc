"""fio: the tool by which disks are measured, as the arm that a store is compared to."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from kvhoist.errors import StorageError

MISSING = "not installed, so there is nothing to compare to: apt-get install fio (Debian, Ubuntu), dnf install fio"
_TIMEOUT_S = 300


def version() -> str | None:
    """Return the version of the fio on PATH, None where there is none."""
    if shutil.which("fio") is None:
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def measure(folder: Path, *, block_bytes: int, total_bytes: int, depth: int, direct: bool) -> tuple[float, float]:
    """Write a file of `total_bytes` in `folder` and read it, `depth` blocks in flight; return both rates in bytes/s.

    As a store does: the file is allocated before it is written, what was written is synced inside of the time, and
    nothing that is read is in the page cache. Raises StorageError where fio fails.
    """
    folder.mkdir()
    write, read = (_run(folder, kind, block_bytes, total_bytes, depth, direct) for kind in ("write", "read"))
    return write, read


def _run(folder: Path, kind: str, block_bytes: int, total_bytes: int, depth: int, direct: bool) -> float:
    options = {
        "name": "kvhoist",
        "directory": folder,
        "filename": "fio",
        "rw": kind,
        "bs": block_bytes,
        "size": total_bytes,
        "iodepth": depth,
        "ioengine": "libaio",
        "direct": int(direct),
        "fallocate": "posix",
        "end_fsync": int(kind == "write"),
        "output-format": "json",
    }
    command = ["fio", *(f"--{name}={value}" for name, value in options.items())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return float(job[kind]["bw_bytes"])
    except subprocess.CalledProcessError as error:
        raise StorageError("fio failed", got=(error.stderr or error.stdout).strip()[-500:]) from error
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError) as error:
        raise StorageError("fio gave no result", got=f"{type(error).__name__}: {error}") from error
