"""`kvhoist ps`, `attach` and `detach` on a real second process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvhoist.cli import app

ENGINE = """
import sys
from support import TinyEngine
engines = [TinyEngine(device_pages=16, host_pages=16) for _ in range(int(sys.argv[1]))]
print("ready", flush=True)
for line in sys.stdin:
    first = engines[0]
    found = first.run([int(line)] * 9)["storage"]
    assert first.cache.flush(30)
    first.cache.evict("device", 16)
    first.cache.evict("host", 16)
    first.scribble()
    first.cache.audit()
    print(found, flush=True)
for engine in engines:
    engine.cache.close()
"""


class Engine:
    """A process that serves prompts of two pages and then keeps them in storage only."""

    def __init__(self, num_caches: int = 1) -> None:
        script = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{ENGINE}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, str(num_caches)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.read() == "ready"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tokens_from_storage(self, prompt: int) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{prompt}\n")
        self.process.stdin.flush()
        return int(self.read())

    def close(self) -> int:
        self.process.communicate(timeout=30)
        return self.process.returncode


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHOIST_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def engine() -> Iterator[Engine]:
    one = Engine()
    yield one
    assert one.close() == 0


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def document(*args: object) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_disk_is_swapped_under_a_running_engine(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (row,) = document("ps")["caches"]
    assert (row["pid"], row["store"], row["model"]) == (engine.process.pid, "no store attached", "tiny")
    assert engine.tokens_from_storage(1) == engine.tokens_from_storage(1) == 0

    assert document("attach", "file:old?capacity=1MiB")["store"] == f"attached: file:{tmp_path}/old?capacity=1MiB"
    assert engine.tokens_from_storage(1) == 0
    assert engine.tokens_from_storage(1) == 8
    refused = run("attach", "memory:")
    assert refused.exit_code == 2
    assert "has a store already" in refused.stderr
    assert "Detach it first" in refused.stderr

    report = document("detach", "--pid", engine.process.pid)
    assert (report["memory_kept"], report["lost_pages"]) == (False, 0)
    assert "was detached at" in document("ps")["caches"][0]["store"]
    assert engine.tokens_from_storage(1) == 0

    assert run("attach", f"file:{tmp_path}/new?capacity=1MiB").exit_code == 0
    assert engine.tokens_from_storage(1) == 0
    assert engine.tokens_from_storage(1) == 8
    assert run("detach", "--no-drain").exit_code == 0
    assert run("attach", f"file:{tmp_path}/old?capacity=1MiB").exit_code == 0
    assert engine.tokens_from_storage(1) == 8, "the old disk is back, with what it held"


def test_an_address_that_cannot_be_opened_is_told_and_changes_nothing(engine: Engine) -> None:
    result = run("attach", "nfs:server")
    assert result.exit_code == 2
    assert "an unknown kind of store" in result.stderr
    assert run("detach").exit_code == 2
    assert document("ps")["caches"][0]["store"] == "no store attached"
    assert engine.tokens_from_storage(5) == 0


def test_which_cache_is_meant_must_be_clear(tmp_path: Path) -> None:
    nobody = run("attach", "memory:")
    assert nobody.exit_code == 2
    assert "no cache runs for this user" in nobody.stderr
    assert "no cache runs" in run("ps").stdout
    two = Engine(2)
    try:
        unclear = run("detach", "--pid", two.process.pid)
        assert unclear.exit_code == 2
        assert "several caches are meant" in unclear.stderr
        assert f"--pid {two.process.pid} --cache 1" in unclear.stderr
        assert "no cache of process 1 runs" in run("detach", "--pid", 1).stderr
        assert run("attach", "memory:", "--cache", 1).exit_code == 0
        stores = [row["store"] for row in document("ps")["caches"]]
        assert stores == ["no store attached", "attached: memory:"]
        assert str(two.process.pid) in run("ps").stdout
    finally:
        assert two.close() == 0


def test_no_socket_is_looked_for_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHOIST_RUNTIME_DIR", "off")
    result = run("ps")
    assert result.exit_code == 2
    assert "KVHOIST_RUNTIME_DIR is off" in result.stderr
