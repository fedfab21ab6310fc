"""The connector on the oldest release that it speaks to: the tests that need no model, on the sources of vLLM 0.20."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OLD = re.search(r"^old_vllm=(\S+)", (ROOT / "scripts/_env.sh").read_text(), re.MULTILINE)
assert OLD is not None
SOURCES = Path(sys.prefix) / f"vllm-{OLD.group(1)}"

FILES = {
    "parts": ["test_caches_of_vllm_0_20.py", "test_identity.py", "test_requests.py", "test_prefixes.py"],
    "hits": ["test_scheduler_hits.py", "test_scheduler_storage.py", "test_prefill_decode.py"],
    "failures": ["test_scheduler_failures.py", "test_scheduler_resets.py", "test_scheduler_aborts.py", "test_start.py"],
    "room": ["test_room.py", "test_random_load.py"],
}


@pytest.mark.timeout(900)
@pytest.mark.skipif(not SOURCES.is_dir(), reason=f"no sources of vLLM in {SOURCES}: scripts/test puts them there")
@pytest.mark.parametrize("name", FILES)
def test_what_needs_no_model_holds_on_the_old_release(name: str) -> None:
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(folder / f for f in FILES[name])]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=890, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\b[1-9]\d* passed", done.stdout)
