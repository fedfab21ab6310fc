"""README's library example runs as it stands, and the second process finds what the first one left."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_library_example_runs_and_its_second_run_is_served_from_disk(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example.count("/tmp/kv") == 1
    script = tmp_path / "example.py"
    script.write_text(example.replace("/tmp/kv", str(tmp_path / "kv")))
    outputs = [
        subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, timeout=120).stdout
        for _ in range(2)
    ]
    assert outputs[0].startswith("0 of 1000 tokens need no computing")
    assert outputs[1].startswith("992 of 1000 tokens need no computing: {'device': 0, 'host': 0, 'storage': 992}")
