"""scripts/rocm-acceptance: on the simulated HIP runtime as a whole, and that it sees what is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kernel_shim
import pytest
import rocm_isa
from device_rank import SMALL, ring_of
from rocm_acceptance import __main__ as command
from rocm_acceptance import machine, matrix, migration, runner, speeds
from rocm_acceptance.parts import PARTS
from rocm_acceptance.report import page
from rocm_acceptance.target import Target

from kvhoist.bench.facts import facts
from kvhoist.bench.shapes import Shape
from kvhoist.errors import MissingDependencyError

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240

needs_compiler = pytest.mark.skipif(kernel_shim.compiler() is None, reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are processes of their own."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT / 'tests'}")


# -- all of it -----------------------------------------------------------------------------------------------------


@needs_compiler
def test_all_of_it_runs_on_the_simulated_runtime_and_says_that_it_was_simulated(tmp_path: Path) -> None:
    script, output = ROOT / "scripts/rocm-acceptance", tmp_path / "found"
    environment = {**os.environ, "KVHOIST_PYTHON": sys.executable}
    ran = subprocess.run(
        [script, "--simulate", "--output", output],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("SIMULATED, no GPU was measured: passed: machine, ")
    result = json.loads(output.with_suffix(".json").read_text())
    assert (result["simulated"], result["status"]) == (True, "passed")
    parts = {part["name"]: part for part in result["parts"]}
    assert list(parts) == [part.name for part in PARTS]
    may_skip = {"migration"} | (set() if rocm_isa.is_installed() else {"isa"})
    assert {name for name, part in parts.items() if part["status"] != "passed"} <= may_skip
    cells = [row for row in parts["matrix"]["rows"] if "cache" in row]
    assert len({(row["cache"], row["order"], row["engine"]) for row in cells}) == 9 * 2 * 3
    assert sum(row["differing_bytes"] for row in cells) == 0
    assert {row["engine"] for row in parts["load"]["rows"] if "engine" in row} == {"staged", "dma", "mapped"}
    assert {row.get("block_quota") for row in parts["load"]["rows"]} == {None, *speeds.QUOTAS}
    told = [value for part in parts.values() for row in part["rows"] for key, value in row.items() if "_gib_s" in key]
    assert {value for value in told if not isinstance(value, dict)} == {None}, "a simulated run measures nothing"
    html = output.with_suffix(".html").read_text()
    assert "Simulated: this ran on a CPU" in html
    assert "25.59" in html, "the published figures"
    assert not re.search(r"(src|href)=(?!\"data:)|https?://", html), "it must stand alone"


# -- a part that breaks --------------------------------------------------------------------------------------------


def _part(tmp_path: Path, code: str, deadline_s: float = 60) -> dict[str, Any]:
    file = tmp_path / "rows.jsonl"
    program = f"import os, signal, sys, time; rows = open({str(file)!r}, 'w'); {code}"
    return runner.run_process([sys.executable, "-c", program], file, deadline_s=deadline_s)


_ROW = """rows.write('{"what": "one", "pass": true}' + chr(10)); rows.flush(); """


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        (_ROW, "passed", ""),
        ("pass", "failed", "it found nothing"),
        (_ROW + "os.kill(os.getpid(), signal.SIGSEGV)", "failed", "ended by SIGSEGV, after 1 rows, last one"),
        (_ROW + "sys.exit('no GPU')", "failed", "ended with exit code 1: no GPU, after 1 rows, last one"),
        (_ROW + """rows.write('{"what": "ha')""", "passed", ""),
        (_ROW + """rows.write('{"what": "two", "pass": false}')""", "failed", "1 of 2 rows, first two"),
        ("""rows.write('{"skipped": "one NUMA node"}')""", "skipped", "one NUMA node"),
    ],
)
def test_a_part_is_judged_by_its_rows_and_its_end(tmp_path: Path, code: str, status: str, reason: str) -> None:
    found = _part(tmp_path, code)
    assert (found["status"], found["reason"]) == (status, reason)


def test_a_part_that_hangs_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = _ROW + f"child = os.fork(); child and open({str(pid_file)!r}, 'w').write(str(child)); time.sleep(1000)"
    found = _part(tmp_path, code, deadline_s=3)
    assert (found["status"], found["reason"]) == ("failed", "stopped after 3 s, after 1 rows, last one")
    assert found["rows"] == [{"what": "one", "pass": True}]
    deadline = time.monotonic() + 30
    while _is_running(int(pid_file.read_text())):
        assert time.monotonic() < deadline, "a process of the part is left"
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_a_part_that_crashes_does_not_take_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner.run_process

    def crash(words: list[str], file: Path, **options: Any) -> dict[str, Any]:
        code = "import os, signal; print('so far', flush=True); os.kill(os.getpid(), signal.SIGABRT)"
        return run([sys.executable, "-c", code] if "machine" in words else words, file, **options)

    monkeypatch.setattr(runner, "run_process", crash)
    arguments = ["--only", "machine", "--only", "isa", "--output", str(tmp_path / "found")]
    assert command.main(arguments) == 1
    result = json.loads((tmp_path / "found.json").read_text())
    statuses = {part["name"]: part["status"] for part in result["parts"]}
    assert statuses == {"machine": "failed", "isa": "passed" if rocm_isa.is_installed() else "skipped"}
    html = (tmp_path / "found.html").read_text()
    assert "ended by SIGABRT" in html
    assert "so far" in html
    assert "failed: machine" in capsys.readouterr().out


def test_without_a_gpu_it_fails_and_says_what_is_missing(tmp_path: Path) -> None:
    if Path("/dev/kfd").exists():
        pytest.skip("here is an AMD GPU")
    assert command.main(["--only", "matrix", "--output", str(tmp_path / "found")]) == 1
    (part,) = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert "AMD's HIP runtime is not installed" in part["reason"]


def test_the_machine_is_told_and_a_compiler_that_is_not_there_fails_it(
    hip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise MissingDependencyError("AMD's run-time compiler is not installed")

    monkeypatch.setattr(machine, "load_hiprtc", missing)
    rows = {row["what"]: row for row in machine.run(Target())}
    assert rows["GPU 0"]["found"] == "simulated GPU 0, gfx942, 4 compute units (measured)"
    assert rows["GPU 1"]["found"] == "simulated GPU 1, gfx942, 4 compute units"
    assert rows["drivers"]["found"].endswith("HIP 7.2")
    assert not rows["hipRTC"]["pass"]
    assert rows["hipRTC"]["found"] == "AMD's run-time compiler is not installed"


# -- wrong bytes ---------------------------------------------------------------------------------------------------


def _small(**options: Any) -> matrix.PlainRank:
    return matrix.PlainRank(SMALL, num_blocks=32, host_pages=12, staging_bytes=ring_of(SMALL), **options)


@pytest.mark.parametrize("shared", [False, True])
def test_right_bytes_pass(hip: Any, shared: bool) -> None:
    with _small(io_backend="dma", shared=shared) as rank:
        found = matrix.moved(rank, (1, 2, 7))
    assert found == {"pages": [1, 2, 7], "bytes": 20 * SMALL.group.page_bytes, "differing_bytes": 0, "pass": True}


@pytest.mark.parametrize("where", ["arena", "cache", "guard"])
def test_a_wrong_byte_is_counted_wherever_it_is(hip: Any, where: str) -> None:
    with _small(io_backend="staged") as rank:
        submit = rank.submit

        def then_spoilt(*job: Any) -> Any:
            transfer = submit(*job)
            transfer.result(matrix.DEADLINE_S)
            region = rank.tensors["k"][0].region
            if where == "arena":
                rank.arena.buffer[5] ^= 1
            else:
                data = rank._window.read(region)
                place = 0 if where == "guard" else matrix.GUARD_BYTES
                data[place] = 0 if where == "guard" else data[place] ^ 1
                rank.platform.write(region, data)
            return transfer

        rank.submit = then_spoilt  # type: ignore[method-assign]
        found = matrix.moved(rank, (1,))
    assert not found["pass"]
    assert found["differing_bytes"] >= 1


def test_a_copy_that_fails_is_a_row_and_not_the_end(hip: Any) -> None:
    hip.fail("hipMalloc", after=3)
    rows = list(matrix._rows([SMALL], ["dma", "staged"], (1,)))
    assert [row["pass"] for row in rows] == [False, True, True, True]
    assert "hipErrorOutOfMemory" in rows[0]["error"]


def test_times_of_a_simulated_migration_are_left_out() -> None:
    found = {"arm": "gtt", "worst_ms": 0.9, "migrations": [{"ms": 3.4, "answers": "512 EFAULT"}], "verdict": "right"}
    assert migration.without_times(found) == {
        "arm": "gtt",
        "migrations": [{"answers": "512 EFAULT"}],
        "verdict": "right",
    }


def test_a_benchmark_that_refuses_is_skipped_with_its_reason() -> None:
    assert "is no device" in migration.bench(["submit", "--device", "tpu"])["skipped"]


# -- speeds --------------------------------------------------------------------------------------------------------


def test_the_published_table_is_whole() -> None:
    known = speeds.published()
    assert known["source"] == "published for MI355X"
    for kind in speeds.KINDS:
        assert sum(len(cells) for cells in known[kind].values()) == 36
        assert {len(figures) for cells in known[kind].values() for figures in cells.values()} == {len(known["arms"])}


@pytest.fixture
def measured(hip: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What parts say where they take the simulated runtime for a GPU, of little data."""
    known = speeds.published()
    little = {**known, "setting": {**known["setting"], "pages": 2}, "MLA": {}, "MHA": {"512": {"16": [21.12, 25.59]}}}
    monkeypatch.setattr(speeds, "published", lambda: little)
    monkeypatch.setattr(speeds, "LEAD_BYTES", 1 << 16)
    monkeypatch.setattr(speeds, "STAGING_BYTES", 16 << 20)
    monkeypatch.setattr(speeds, "_LOADS", (Shape(True, 576, 3, 16),))
    monkeypatch.setattr(speeds, "_LOAD_PAGES", (1, 2))
    target = Target()
    rows = {"write-back": list(speeds.write_back(target)), "load": list(speeds.loads(target))}
    part = {"status": "passed", "reason": "", "seconds": 1.0, "said": ""}
    parts = [{"name": name, "title": name, "rows": found, **part} for name, found in rows.items()]
    return {"simulated": False, "status": "passed", **facts(), "parts": parts, "published": known}


def test_on_a_gpu_speeds_stand_in_the_table_beside_the_published_ones(measured: dict[str, Any]) -> None:
    write_back, load = (part["rows"] for part in measured["parts"])
    assert [row["published_gib_s"] for row in write_back] == [{"AOT kernel": 21.12, "staged": 25.59}]
    assert {(row["engine"], row["block_quota"]) for row in load} == {
        ("staged", None),
        ("dma", None),
        *(("mapped", quota) for quota in speeds.QUOTAS),
    }
    assert len(load) == 7 * 2
    assert all(row["pass"] and row["load_gib_s"] > 0 and row["peak_gib_s"] > 0 for row in load)
    html = page(measured)
    cell = f"{write_back[0]['staged_gib_s']:.2f} / {write_back[0]['mapped_gib_s']:.2f}<br><small>21.12 / 25.59</small>"
    assert cell in html
    assert "Simulated" not in html
    pytest.importorskip("matplotlib")
    assert html.count('src="data:image/png;base64,') == 2


def test_what_others_wrote_cannot_become_html(measured: dict[str, Any]) -> None:
    measured["parts"][0] |= {"status": "failed", "reason": "<b>", "said": "<script>"}
    html = page(measured)
    assert "<script>" not in html
    assert "<b>" not in html
    assert "&lt;script&gt;" in html
