from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvhoist.bench import fio, storage
from kvhoist.errors import StorageError

FAKE = """#!/usr/bin/env python3
import json, sys
if sys.argv[1:] == ["--version"]:
    print("fio-3.0")
    sys.exit()
options = dict(argument.lstrip("-").split("=", 1) for argument in sys.argv[1:])
print("fio: a warning of its own")
print(json.dumps({"jobs": [{options["rw"]: {"bw_bytes": int(options["bs"]) * int(options["iodepth"])}}]}))
"""


def fake_fio(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = FAKE) -> None:
    folder.mkdir()
    (folder / "fio").write_text(text)
    (folder / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    folder.mkdir()
    result = storage.run(folder, num_pages=300, page_bytes=[1 << 16], smoke=True)
    json.dumps(result)
    assert list(folder.iterdir()) == [], "nothing is left behind"
    (size,) = result["sizes"]
    assert size["page_bytes"] == 1 << 16
    assert result["reindex"]["num_pages"] == 300
    assert result["reindex"]["pass"]
    assert result["disk"]
    assert "in all arms" in result["caching"]
    return result, size


def test_the_benchmark_compares_to_the_better_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fio(tmp_path / "bin", monkeypatch)
    result, size = run(tmp_path / "disk")
    assert result["fio"] == "fio-3.0"
    for direction in ("write", "read"):
        assert set(size[direction]["gib_per_s"]) == {"fio 8", "fio 64", "store", "pool"}
        pool = size[direction]["gib_per_s"]["pool"] * (1 << 30) / (64 << 16)
        assert size[direction]["ratio"]["pool"] == pytest.approx(pool, rel=0.01)


def test_without_fio_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result, size = run(tmp_path / "disk")
    assert "not installed" in result["fio"]
    assert "apt-get install fio" in result["fio"]
    assert not result["pass"]
    assert "ratio" not in size["read"]
    assert set(size["read"]["gib_per_s"]) == {"store", "pool"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#!/bin/sh\necho no such engine >&2\nexit 1\n", "fio failed.*no such engine"),
        ("#!/bin/sh\necho hello\n", "fio gave no result"),
        ("#!/bin/sh\necho '{}'\n", "fio gave no result.*jobs"),
    ],
)
def test_a_fio_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    fake_fio(tmp_path / "bin", monkeypatch, text)
    with pytest.raises(StorageError, match=message):
        fio.measure(tmp_path / "disk", block_bytes=4096, total_bytes=8192, depth=1, direct=False)
