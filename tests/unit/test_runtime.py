"""The socket of a running cache: for its user alone, and no peer or folder can do more than waste its own time."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from mover_support import until
from support import TinyEngine

from kvhoist.errors import ConfigError, StorageError
from kvhoist.runtime import RuntimeServer, ask, running, server
from kvhoist.runtime.wire import MAX_LINE_BYTES
from kvhoist.settings import Settings


class Fake:
    """Notes what it was asked; an attach waits for `gate`."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()

    def status(self) -> Mapping[str, Any]:
        return {"store": "no store attached"}

    def attach(self, address: str) -> Mapping[str, Any]:
        self.asked.append(address)
        assert self.gate.wait(30)
        if address == "bug:":
            raise SystemExit("a stranger's store ends the process")
        if address == "bad:":
            raise ConfigError("an unknown kind of store", got="bad:")
        return {"store": address}

    def detach(self, *, drain: bool, timeout_s: float) -> Mapping[str, Any]:
        self.asked.append((drain, timeout_s))
        return {"memory_kept": False}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVHOIST_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def opened(folder: Path, fake: Fake) -> Iterator[RuntimeServer]:
    one = RuntimeServer(fake, folder)
    yield one
    fake.gate.set()
    one.close()


def connect(path: Path) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(10)
    peer.connect(str(path))
    return peer


def test_a_request_gets_its_answer_and_an_error_its_text(opened: RuntimeServer, fake: Fake) -> None:
    status = ask(opened.path, {"do": "status"}, 5)
    assert (status["pid"], status["store"]) == (os.getpid(), "no store attached")
    assert ask(opened.path, {"do": "attach", "address": "file:/x"}, 5) == {"store": "file:/x"}
    assert ask(opened.path, {"do": "detach", "drain": False, "timeout_s": 2}, 5) == {"memory_kept": False}
    assert fake.asked == ["file:/x", (False, 2.0)]
    with pytest.raises(StorageError, match="an unknown kind of store; got bad:"):
        ask(opened.path, {"do": "attach", "address": "bad:"}, 5)
    with pytest.raises(StorageError, match="SystemExit: a stranger's store"):
        ask(opened.path, {"do": "attach", "address": "bug:"}, 5)


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"[]\n",
        b"{\n",
        b"[" * 60_000 + b"\n",
        b'{"do": ' + b"9" * 50_000 + b"}\n",
        b'{"do": "exec"}\n',
        b'{"do": ["attach"]}\n',
        b'{"do": "attach"}\n',
        b'{"do": "attach", "address": 5}\n',
        b'{"do": "attach", "address": "' + b"x" * 5000 + b'"}\n',
        b'{"do": "detach", "drain": "no"}\n',
        b'{"do": "detach", "timeout_s": -1}\n',
        b'{"do": "detach", "timeout_s": Infinity}\n',
        b'{"do": "detach", "timeout_s": 1e999}\n',
        b"\xff\xfe\x00\n",
        b"\x80\x04\x95 a pickle is no line of JSON\n",
        b"x" * (MAX_LINE_BYTES + 10),
    ],
)
def test_a_line_that_is_no_request_is_answered_with_an_error_and_changes_nothing(
    line: bytes, opened: RuntimeServer, fake: Fake
) -> None:
    with connect(opened.path) as peer:
        peer.sendall(line)
        answer = json.loads(peer.makefile().readline())
    assert answer["ok"] is False
    assert answer["error"]
    assert fake.asked == []
    assert ask(opened.path, {"do": "status"}, 5)["store"] == "no store attached"


def test_peers_that_say_nothing_or_leave_cost_a_few_seconds_and_others_are_served(
    opened: RuntimeServer, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_PEER_S", 0.2)
    silent = [connect(opened.path) for _ in range(server._MOST_PEERS)]
    for peer in silent:
        assert b"no whole line within" in peer.recv(1000)
        peer.close()
    slow = connect(opened.path)
    until(lambda: _sent(slow, b'{"do"') is False, "the end of a peer that sends byte by byte")
    for _ in range(50):
        with contextlib.suppress(BlockingIOError):  # the queue of those that nobody has looked at yet is full
            connect(opened.path).close()
    until(lambda: ask_status(opened.path), "an answer")
    fake.gate.clear()
    with connect(opened.path) as gone:
        gone.sendall(b'{"do": "attach", "address": "file:/y"}\n')
        until(lambda: fake.asked == ["file:/y"])
    fake.gate.set()
    until(lambda: ask_status(opened.path), "an answer")


def _sent(peer: socket.socket, data: bytes) -> bool:
    try:
        peer.sendall(data[:1])
        time.sleep(0.01)
    except OSError:
        return False
    return True


def ask_status(path: Path) -> bool:
    try:
        return bool(ask(path, {"do": "status"}, 5))
    except StorageError:
        return False


def test_more_peers_than_there_is_room_for_are_turned_away_and_a_status_is_told_beside_a_slow_attach(
    opened: RuntimeServer, fake: Fake
) -> None:
    fake.gate.clear()
    attaching = connect(opened.path)
    attaching.sendall(b'{"do": "attach", "address": "file:/slow"}\n')
    until(lambda: fake.asked == ["file:/slow"])
    assert ask(opened.path, {"do": "status"}, 5)["pid"] == os.getpid()
    until(lambda: _takes_all_places(opened), "the last place")
    with connect(opened.path) as peer:
        assert peer.recv(10) == b"", "it is turned away, not queued"
    for _ in range(server._MOST_PEERS - 1):
        opened._peers.release()
    fake.gate.set()
    assert json.loads(attaching.makefile().readline())["ok"]
    attaching.close()


def _takes_all_places(opened: RuntimeServer) -> bool:
    """Take the places that a slow attach leaves."""
    places = [opened._peers.acquire(blocking=False) for _ in range(server._MOST_PEERS - 1)]
    if all(places):
        return True
    for _ in range(sum(places)):
        opened._peers.release()
    return False


def test_another_user_is_not_answered(opened: RuntimeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_uid_of", lambda _: os.geteuid() + 1)
    with connect(opened.path) as peer:
        assert peer.recv(10) == b""


def test_folder_and_socket_are_private_and_gone_after_close(folder: Path, fake: Fake) -> None:
    before = os.umask(0)
    try:
        one = RuntimeServer(fake, folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [found.path for found in running(folder)] == [one.path]
    one.close()
    one.close()
    assert list(folder.iterdir()) == []
    assert not one._thread.is_alive()


@pytest.mark.parametrize("kind", ["open", "link", "file", "deep"])
def test_where_no_private_folder_can_be_there_is_one_line_in_the_log_and_no_socket(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "real")
    elif kind == "file":
        folder.write_text("")
    else:
        folder = tmp_path / "no" / "such"
    monkeypatch.setenv("KVHOIST_RUNTIME_DIR", str(folder))
    with caplog.at_level(logging.WARNING), TinyEngine(device_pages=8, host_pages=8) as engine:
        engine.run([1] * 9)
    assert len([record for record in caplog.records if "cannot reach this process" in record.message]) == 1
    if kind in ("open", "link"):
        with pytest.raises(ConfigError, match="not private"):
            running(folder)


def test_a_process_that_died_leaves_a_socket_that_the_next_look_removes(folder: Path, fake: Fake) -> None:
    script = (
        "import sys, pathlib, signal\n"
        "from kvhoist.runtime import RuntimeServer\n"
        "one = RuntimeServer(None, pathlib.Path(sys.argv[1]))\n"
        "print(one.path, flush=True)\n"
        "signal.pause()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    path = Path(child.stdout.readline().strip())
    assert path.exists()
    child.send_signal(signal.SIGSTOP)
    try:
        stopped = running(folder)
        assert [one.pid for one in stopped] == [child.pid]
        assert "has not answered" in stopped[0].problem
    finally:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait(30)
        child.stdout.close()
    assert path.exists()
    assert running(folder) == []
    assert not path.exists()


def test_a_forked_child_holds_no_socket(opened: RuntimeServer, folder: Path) -> None:
    come, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            opened.close()  # which must not remove the parent's file
            os.write(come[1], b"%d" % opened._listener.fileno())
            os.read(go[0], 1)
        finally:
            os._exit(0)
    assert os.read(come[0], 10) == b"-1"
    try:
        assert ask(opened.path, {"do": "status"}, 5)["pid"] == os.getpid()
        opened.close()
        assert not opened.path.exists()
    finally:
        os.write(go[1], b"x")
        os.waitpid(pid, 0)
        for end in (*come, *go):
            os.close(end)


def test_a_cache_is_found_until_it_is_closed_and_not_where_it_is_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TinyEngine(device_pages=8, host_pages=8), TinyEngine(device_pages=8, host_pages=8):
        found = running(folder)
        assert [one.status["model"] for one in found] == ["tiny", "tiny"]
        assert len({one.cache for one in found}) == 2
    assert running(folder) == []
    monkeypatch.setenv("KVHOIST_RUNTIME_DIR", "off")
    with TinyEngine(device_pages=8, host_pages=8):
        assert running(folder) == []


def test_the_folder_by_the_environment(tmp_path: Path) -> None:
    def chosen(**env: str) -> Path | None:
        return Settings.from_env({"HOME": "/h", **env}).runtime_dir

    assert chosen(XDG_RUNTIME_DIR=str(tmp_path)) == tmp_path / "kvhoist"
    assert chosen(XDG_RUNTIME_DIR="/none/there") == Path(f"/tmp/kvhoist-{os.geteuid()}")
    assert chosen(TMPDIR="/var/tmp") == Path(f"/var/tmp/kvhoist-{os.geteuid()}")
    assert chosen(KVHOIST_RUNTIME_DIR="/run/x") == Path("/run/x")
    assert chosen(KVHOIST_RUNTIME_DIR="off") is None
    with pytest.raises(ConfigError, match="KVHOIST_RUNTIME_DIR cannot be a folder"):
        chosen(KVHOIST_RUNTIME_DIR="relative")
