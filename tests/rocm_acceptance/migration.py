"""The page-migration stall, by `kvhoist bench migration`, which refuses where it cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from rocm_acceptance.target import Row, Target

_RUN = "from kvhoist.cli import main; main()"
_REFUSED = 2


def run(target: Target) -> Iterator[Row]:
    """Yield what the benchmark found, or why it refused; of a simulated run no times."""
    found = bench(["migration", *(["--simulate"] if target.is_simulated else [])])
    yield without_times(found) if target.is_simulated else found


def without_times(found: Any) -> Any:
    """Return plain data less what is called `ms` or `..._ms`."""
    if isinstance(found, dict):
        kept = ((name, value) for name, value in found.items() if name.rpartition("_")[2] != "ms")
        return {name: without_times(value) for name, value in kept}
    return [without_times(one) for one in found] if isinstance(found, list) else found


def bench(arguments: list[str]) -> Row:
    """Return the result of `kvhoist bench`; where it refuses, its words. Raises CalledProcessError where it fails."""
    command = [sys.executable, "-c", _RUN, "bench", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == _REFUSED:
        return {"skipped": " ".join(done.stderr.split())}
    if done.returncode not in (0, 1):
        sys.stderr.write(done.stderr)
        done.check_returncode()
    result: Row = json.loads(done.stdout)
    return result
