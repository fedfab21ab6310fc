"""`kvhoist demo-cluster` on a tiny model: B loads what A computed, A and the master may fail, and a fault is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner
from vllm_servers import gone, wait_until, write_tiny_chat_model

import kvhoist.demo.cluster_session as cluster_session
from kvhoist.cli import app
from kvhoist.demo.cluster import Cluster
from kvhoist.demo.cluster_result import ClusterResult, ClusterRow
from kvhoist.demo.cluster_session import ClusterOptions, ClusterSession, running
from kvhoist.demo.conversations import conversations
from kvhoist.demo.vllm_session import chat_and_others
from kvhoist.demo.vllm_side import Side
from kvhoist.storage import MooncakeStore, open_store

GOOD = ClusterRow("A answered, B loads", 2000, 0, 0, 1984, 0.0, 0.1, 1.0, None)
IDLE = {"offload": 0, "persist": 0, "prefetch": 0, "load": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [talk.messages[0]["content"] for talk in conversations().values()]
    return write_tiny_chat_model(tmp_path_factory.mktemp("demo-cluster") / "model", texts)


@pytest.mark.timeout(600)
def test_b_loads_what_a_computed_and_goes_on_without_a_and_without_the_master(model: Path, tmp_path: Path) -> None:
    """On the same servers first the control, since servers take long to start."""
    options = ClusterOptions(model=model, logs=tmp_path, dtype="float32", segment_bytes=64 << 20)
    with running(options) as started:
        judge_pages_that_vanish_before_b_asks(started)
        session = session_of(started)
        session.play()
    result = session.result
    assert result.problems == []
    assert len(result.rows) == 6
    shared, prefilled, next_turn, no_master, back, no_a = result.rows
    for row in (shared, prefilled, back, no_a):
        assert row.stored_tokens > 1900
        assert row.device_tokens == row.host_tokens == 0
    assert next_turn.device_tokens + next_turn.host_tokens > 1800
    assert next_turn.stored_tokens > 0
    assert no_master.stored_tokens == no_master.device_tokens == 0
    assert result.recovery_seconds is not None
    assert result.pages["A"]["persist"] > 300
    assert result.pages["B"]["load"] > 200


def judge_pages_that_vanish_before_b_asks(started: tuple[Cluster, Side, Side]) -> None:
    """The session must tell that a hand has emptied the store between A's answer and B's."""

    def empty_the_store(what: str) -> None:
        if what == "B answers the same":
            store = open_store(started[0].url("127.0.0.1"))
            assert isinstance(store, MooncakeStore)
            assert store._client.call(lambda engine: engine.remove_all(True)) > 50
            store.close()

    session = session_of(started, empty_the_store)
    _, (_, stranger) = chat_and_others()
    session.share(stranger)
    (row,) = session.result.rows
    assert row.problem is not None
    assert row.problem.startswith("0 tokens were cached, 2")
    assert row.stored_tokens == 0


def session_of(started: tuple[Cluster, Side, Side], on_step: Any = lambda what: None) -> ClusterSession:
    return ClusterSession(*started, 8, on_step=on_step, on_row=lambda row: None)


def test_a_demo_that_is_interrupted_leaves_no_process(model: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "KVHOIST_CACHE_DIR": str(tmp_path)}
    kvhoist = Path(sys.executable).with_name("kvhoist")
    demo = subprocess.Popen(["env", "--default-signal=INT", kvhoist, "demo-cluster", "--model", model], env=environment)
    root = psutil.Process(demo.pid)
    wait_until(lambda: len(root.children()) == 5, "a master, two lenders and two servers are started")
    processes = root.children(recursive=True)
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) != 0
    wait_until(lambda: gone(processes), "all have ended")


@pytest.mark.parametrize(
    ("rows", "pages", "recovery", "expected"),
    [
        ([GOOD], {"A": {**IDLE, "persist": 9}, "B": {**IDLE, "load": 9}}, 1.0, None),
        (
            [GOOD, ClusterRow("x", 9, 0, 0, 0, 0.0, 0.1, 1.0, "token 1: 'a' and 'b'")],
            {},
            1.0,
            "x: token 1: 'a' and 'b'",
        ),
        ([GOOD], {"B": {**IDLE, "persist": 1}}, 1.0, "server B is not to persist, and moved 1 pages so"),
        ([GOOD], {"A": {**IDLE, "prefetch": 2}}, 1.0, "server A is not to prefetch, and moved 2 pages so"),
        ([GOOD], {}, None, "B loaded nothing in 120 s after the master was back"),
    ],
)
def test_the_exit_code_and_the_last_words_say_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
    cache_dir: Path,
    model: Path,
    rows: list[ClusterRow],
    pages: dict[str, dict[str, int]],
    recovery: float | None,
    expected: str | None,
) -> None:
    result = ClusterResult(rows, pages, recovery)
    monkeypatch.setattr(cluster_session, "play", lambda options, **_: result)
    done = CliRunner().invoke(app, ["demo-cluster", "--model", str(model), "--json"])
    assert done.exit_code == (0 if expected is None else 1), done.output
    found = json.loads(done.stdout)
    assert found["problems"] == ([] if expected is None else [expected])
    assert ("WRONG: " in done.stderr) == (expected is not None)
    assert found["rows"][0]["ttft_ratio"] == 0.1


@pytest.mark.parametrize("wrong", [["--dtype", "int8"], ["--model", "/nowhere"]])
def test_options_that_cannot_be_are_refused_before_anything_is_started(wrong: list[str], cache_dir: Path) -> None:
    assert CliRunner().invoke(app, ["demo-cluster", *wrong]).exit_code == 2
    assert not (cache_dir / "demo-cluster").exists()
