"""`kvhoist demo-vllm`, whole, on a tiny model: both tiers serve, all is identical, and no process is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner
from vllm_servers import gone, wait_until, write_tiny_chat_model

from kvhoist.cli import app
from kvhoist.demo.child import ServerFailedError
from kvhoist.demo.conversations import conversations
from kvhoist.demo.vllm_chat import Reply
from kvhoist.demo.vllm_server import ServerOptions, VllmServer
from kvhoist.demo.vllm_session import NUM_TURNS, chat_and_others


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [talk.messages[0]["content"] for talk in conversations().values()]
    return write_tiny_chat_model(tmp_path_factory.mktemp("demo-vllm") / "model", texts)


@pytest.mark.timeout(600)
def test_evicted_prefixes_come_from_the_host_and_after_a_restart_from_disk_and_all_is_identical(
    model: Path, cache_dir: Path
) -> None:
    done = CliRunner().invoke(app, ["demo-vllm", "--model", str(model), "--dtype", "float32", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["identical"] is True
    assert found["ttft_ratio"] > 0
    first, *later, last = found["turns"]
    assert len(found["turns"]) == NUM_TURNS
    assert first["cached_tokens"] == 0
    for turn in later:
        assert turn["host_tokens"] == turn["cached_tokens"] > 1900
    assert last["after_restart"]
    assert last["disk_tokens"] == last["cached_tokens"] > 1900
    assert sorted(path.name for path in cache_dir.iterdir()) == ["demo-vllm"]  # the store is removed, the logs are kept


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
def test_a_demo_that_is_interrupted_leaves_no_process_and_no_store(model: Path, tmp_path: Path, number: int) -> None:
    environment = {**os.environ, "KVHOIST_CACHE_DIR": str(tmp_path)}
    # As in a terminal: a shell's background job ignores Ctrl-C, and its children inherit that. By `env`, not in a fork
    # of this process, whose other threads hold locks.
    command = ["env", "--default-signal=INT", Path(sys.executable).with_name("kvhoist"), "demo-vllm", "--model", model]
    demo = subprocess.Popen(command, env=environment)
    root = psutil.Process(demo.pid)
    wait_until(lambda: len(root.children(recursive=True)) >= 2, "both servers are started")
    processes = root.children(recursive=True)
    demo.send_signal(number)
    assert demo.wait(60) != 0
    wait_until(lambda: gone(processes), "the servers have ended")
    assert not list(tmp_path.glob("demo-*/kvhoist-store.json"))


def test_a_server_that_cannot_start_is_told_with_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "nonsense"}')
    server = VllmServer(ServerOptions(model=tmp_path / "model", log=tmp_path / "log", device_blocks=8))
    with pytest.raises(ServerFailedError, match="ended before it was ready") as caught, server:
        pass
    assert "nonsense" in caught.value.tail


def test_the_chat_and_the_others_are_as_long_and_share_no_beginning() -> None:
    chat, others = chat_and_others()
    beginnings = [talk.messages[0]["content"] for talk in (chat, *others)]
    assert len({text[:40] for text in beginnings}) == 3
    assert all(len(text) > 7000 for text in beginnings)
    assert all(len(talk.questions) >= NUM_TURNS - 1 for talk in (chat, *others))


def test_answers_differ_by_their_tokens_and_by_the_last_bit_of_a_log_probability() -> None:
    reply = Reply("ab", ("a", "b"), (-0.5, -1.0), 10, 0, 0.1, 0.2)
    assert reply.difference(reply, cached_tokens=0) is None
    assert "32 tokens were cached, 0 where" in str(reply.difference(reply, cached_tokens=32))
    other = Reply("ab", ("a", "b"), (-0.5, -1.0000000000000002), 10, 0, 0.1, 0.2)
    assert "log probability of token 1" in str(reply.difference(other, cached_tokens=0))
    other = Reply("ac", ("a", "c"), (-0.5, -1.0), 10, 0, 0.1, 0.2)
    assert "token 1" in str(reply.difference(other, cached_tokens=0))


@pytest.mark.parametrize("wrong", [["--dtype", "int8"], ["--host-bytes", "lots"], ["--model", "/nowhere"]])
def test_options_that_cannot_be_are_refused_before_anything_is_started(wrong: list[str], cache_dir: Path) -> None:
    assert CliRunner().invoke(app, ["demo-vllm", *wrong]).exit_code == 2
    assert not (cache_dir / "demo-vllm").exists()
