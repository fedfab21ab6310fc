"""How a crash of a test process is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(("signal", "traced"), [("SIGSEGV", True), ("SIGKILL", False)])
def test_a_worker_that_crashes_tells_how_and_where(signal: str, traced: bool, tmp_path: Path) -> None:
    test = f"import os, signal\ndef test_that_crashes():\n    os.kill(os.getpid(), signal.{signal})\n"
    (tmp_path / "test_one.py").write_text(test)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-p", "crash_reports", "-n", "1", "--max-worker-restart=0"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    ran = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1
    assert f"crashed while running 'test_one.py::test_that_crashes', by {signal}" in ran.stdout
    assert ("in test_that_crashes" in ran.stdout) == traced, ran.stdout
