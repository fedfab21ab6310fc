"""The page-migration stall, by `kvhoist bench migration`, which refuses where it cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from rocm_acceptance.target import Row, Target

_RUN = "from kvhoist.cli import main; main()"
_REFUSED = 2


def run(target: Target) -> Iterator[Row]:
    """Yield what the benchmark found, or why it refused."""
    yield bench(["migration", *(["--simulate"] if target.is_simulated else [])])


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
