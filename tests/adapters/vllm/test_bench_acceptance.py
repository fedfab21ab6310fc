"""`scripts/vllm-gpu-acceptance`: its arms, what it says where one cannot run, and the whole of it on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

import kvhoist.demo.vllm_acceptance as acceptance
from kvhoist.adapters.vllm.options import ConnectorOptions
from kvhoist.cli import app
from kvhoist.demo.child import ServerFailedError
from kvhoist.demo.vllm_acceptance_plot import plot_acceptance
from kvhoist.demo.vllm_load import Played, RequestFailedError, Served
from kvhoist.demo.vllm_trace import ConversationSizes, Trace, conversations
from kvhoist.errors import ConfigError

SCRIPT = Path(__file__).parents[3] / "scripts/vllm-gpu-acceptance"
TRACE = conversations(ConversationSizes(2, 2, 20, 0, 5, 4), 300, seed=0)


def options(tmp_path: Path, **changes: Any) -> acceptance.AcceptanceOptions:
    base = acceptance.AcceptanceOptions(
        model=str(tmp_path), logs=tmp_path / "logs", on_gpu=True, max_tokens=100, host_bytes=1 << 30, device_tokens=640
    )
    return replace(base, **changes)


def argument(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


# -- the arms --------------------------------------------------------------------------------------------------------


def test_arms_differ_by_nothing_but_the_connector(tmp_path: Path) -> None:
    chosen = options(tmp_path, server=("--tensor-parallel-size", "4"))
    commands = {name: acceptance.server_of(name, chosen).command(8000) for name in acceptance.ARMS}
    for name in ("native", "kvhoist"):
        at = commands[name].index("--kv-transfer-config")
        assert commands[name][:at] + commands[name][at + 2 :] == commands["none"]
    assert "--enforce-eager" not in commands["none"], "CUDA graphs stay on"
    assert argument(commands["none"], "--num-gpu-blocks-override") == "41", "640 tokens, and the null block"
    assert argument(commands["none"], "--tensor-parallel-size") == "4"
    config = json.loads(argument(commands["kvhoist"], "--kv-transfer-config"))
    assert ConnectorOptions.parse(config["kv_connector_extra_config"]).host_bytes == 1 << 30


def test_the_native_arm_is_what_this_vllm_reads(tmp_path: Path) -> None:
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = acceptance.connector_of("native", options(tmp_path, native={"eviction_policy": "arc"}))
    assert config is not None
    assert config["kv_connector"] in KVConnectorFactory._registry
    read = "".join(path.read_text() for path in (Path(vllm.__file__).parent / "v1/kv_offload").rglob("*.py"))
    known = [name for name in config["kv_connector_extra_config"] if f'"{name}"' in read]
    assert set(config["kv_connector_extra_config"]) - set(known) <= {"offload_prompt_only"}, "which 0.20 ignores"


def test_unknown_arms_are_refused(tmp_path: Path) -> None:
    for arms in (("none", "lmcache"), (), ("none", "none")):
        with pytest.raises(ConfigError, match="arms"):
            options(tmp_path, arms=arms)


class FakeVllmServer:
    """Starts and answers at once, or fails as `fails` says."""

    fails: ClassVar[dict[str, Exception]] = {}
    ready_seconds = 1.0
    url = ""

    def __init__(self, options: acceptance.ArmOptions) -> None:
        self.name = options.log.stem.removeprefix("vllm-")
        self.url = self.name

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def wait_ready(self, timeout_s: float) -> None:
        if self.name in self.fails:
            raise self.fails[self.name]

    def metrics(self) -> Any:
        return type("Metrics", (), {"samples": (("vllm:kvhoist_jobs_total", {"kind": "load"}, 3.0),)})

    def log_tail(self) -> str:
        return "its last words"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeVllmServer]:
    def play(url: str, trace: Trace, *, clients: int, answers: Any = None, on_served: Any = None) -> Played:
        def tokens(name: str) -> tuple[int, ...]:
            return (9,) * 4 if url == "kvhoist" and name == "c0t2" else (len(name),) * 4

        served = [
            Served(request, tokens(request.name), 0.5, (0.1, 0.2, 0.3), request.num_prompt_tokens, 10)
            for request in trace.requests
        ]
        return Played(served, 2.0)

    monkeypatch.setattr(acceptance, "VllmServer", FakeVllmServer)
    monkeypatch.setattr(acceptance, "play", play)
    monkeypatch.setattr(acceptance, "open_platform", lambda device: None)
    monkeypatch.setattr(FakeVllmServer, "fails", {})
    return FakeVllmServer


def test_answers_are_compared_with_the_first_arms(fake: type[FakeVllmServer], tmp_path: Path) -> None:
    result = acceptance.run(options(tmp_path), TRACE)
    assert result["pass"]
    assert {name: arm["answers_as_first_arm"] for name, arm in result["arms"].items()} == {
        "none": 1.0,
        "native": 1.0,
        "kvhoist": 0.75,
    }
    assert result["arms"]["native"]["output_tokens_per_s"] == 8.0
    assert result["arms"]["native"]["itl_ms"] == {"mean": 200.0, "p50": 200.0, "p99": 300.0}
    assert "round" in result["why_answers_may_differ"]
    plot_acceptance(result, tmp_path / "three.png")
    assert (tmp_path / "three.png").read_bytes()[:4] == b"\x89PNG"


def test_an_arm_that_fails_says_why_with_its_log_and_the_others_go_on(
    fake: type[FakeVllmServer], tmp_path: Path
) -> None:
    fake.fails = {
        "native": ServerFailedError("the server ended", got="exit status 1", tail="CUDA out of memory"),
        "none": RequestFailedError("refused"),
    }
    result = acceptance.run(options(tmp_path), TRACE)
    assert not result["pass"]
    native, none = result["arms"]["native"], result["arms"]["none"]
    assert native["log_tail"] == ["CUDA out of memory"]
    assert "exit status 1" in native["not_run"]
    assert none["log_tail"] == ["its last words"]
    assert result["arms"]["kvhoist"]["throughput_ratio"] == 1.0, "the first arm that ran is what others are judged by"
    plot_acceptance(result, tmp_path / "one.svg")


def test_kvhoist_without_a_platform_for_the_gpu_is_left_out_and_said(
    fake: type[FakeVllmServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(device: Any) -> None:
        raise ConfigError("no platform serves this device", got=device)

    monkeypatch.setattr(acceptance, "open_platform", refuse)
    result = acceptance.run(options(tmp_path), TRACE)
    assert result["pass"]
    assert "no GPU platform yet" in result["arms"]["kvhoist"]["not_run"]


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no GPU was found"),
        (["--arms", "none,lmcache", "--smoke"], "not the arms"),
        (["--kvhoist", "{", "--smoke"], "--kvhoist is no JSON"),
        (["--native", "[]", "--smoke"], "--native is no JSON object"),
        (["--plot", "a.gif"], "no picture's name"),
        (["--smoke", "--model", "/nowhere"], "config cannot be read"),
        (["--smoke", "--trace", "/nowhere"], "trace cannot be read"),
    ],
)
def test_what_cannot_be_is_said_before_a_server_is_started(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(acceptance, "has_gpu", lambda: False)
    monkeypatch.setattr(acceptance.VllmServer, "start", lambda self: pytest.fail("a server was started"))
    result = CliRunner().invoke(app, ["bench", "vllm-acceptance", *arguments])
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


def test_the_script_runs_in_the_environment_of_vllm_or_says_how() -> None:
    environment = {**os.environ, "PYTHON": "/bin/false"}
    result = subprocess.run([SCRIPT, "--model", "m"], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "pip install" in result.stderr


@pytest.mark.timeout(600)
def test_a_smoke_run_plays_the_trace_on_the_cpu_and_says_why_the_native_arm_is_left_out(tmp_path: Path) -> None:
    """Two real servers of a tiny model."""
    picture = tmp_path / "picture.png"
    environment = {**os.environ, "PYTHON": sys.executable, "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(
        [SCRIPT, "--smoke", "--json", "--plot", picture, "--logs", tmp_path / "logs"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    arms = result["arms"]
    assert "refuses the CPU platform" in arms["native"]["not_run"]
    for name in ("none", "kvhoist"):
        assert arms[name]["ttft_ms"]["p50"] > 0
        assert arms[name]["itl_ms"]["p99"] > 0
        assert arms[name]["answers_as_first_arm"] == 1.0
    assert arms["kvhoist"]["cached_tokens"] > arms["none"]["cached_tokens"]
    assert arms["kvhoist"]["counters"]["vllm:kvhoist_hit_tokens_total{host}"] > 0
    assert picture.stat().st_size > 10_000
    assert sorted(path.name for path in (tmp_path / "logs").glob("*.log")) == ["vllm-kvhoist.log", "vllm-none.log"]
