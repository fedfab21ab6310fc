"""Programs that the demos start: ended whole, soon where they never answered, in their own time where they did."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from vllm_servers import gone, wait_until

from kvhoist.demo.child import ChildProcess, ServerFailedError, free_port, stop_all

DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("up", flush=True)
time.sleep(600)
"""
TIDY = """
import pathlib, signal, sys, time
def end(*_):
    time.sleep(2)
    pathlib.Path(sys.argv[1]).write_text("tidied up")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(600)
"""


def child(code: str, log: Path, *arguments: object) -> ChildProcess:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return ChildProcess("the program", command, log, lambda: "up" in log.read_text())


@pytest.mark.timeout(25)  # each of them has 30 s once it has answered
def test_programs_that_never_answered_and_hear_no_sigterm_are_ended_soon_with_their_helpers(tmp_path: Path) -> None:
    children = [child(DEAF, tmp_path / str(i)) for i in range(3)]
    for one in children:
        one.start()
    wait_until(lambda: all("up" in one.log.read_text() for one in children), "all are up")
    processes = [p for one in children for p in (psutil.Process(one.pid), *psutil.Process(one.pid).children())]
    assert len(processes) == 6
    stop_all(children)
    wait_until(lambda: gone(processes), "all have ended")
    stop_all(children)


SHARER = """
import time
from multiprocessing.shared_memory import SharedMemory
print("up", SharedMemory(create=True, size=4096).name, flush=True)
time.sleep(600)
"""


def test_a_program_that_is_killed_leaves_no_shared_memory(tmp_path: Path) -> None:
    one = child(SHARER, tmp_path / "log")
    one.start()
    one.wait_ready(30.0)
    shared = Path("/dev/shm") / one.log.read_text().split()[1]
    assert shared.exists()
    one.kill()
    assert not shared.exists()


def test_a_program_that_answered_may_tidy_up(tmp_path: Path) -> None:
    with child(TIDY, tmp_path / "log", tmp_path / "tidied") as one:
        assert one.ready_seconds > 0
    assert (tmp_path / "tidied").read_text() == "tidied up"


def test_a_program_that_is_killed_can_be_started_again(tmp_path: Path) -> None:
    with child(TIDY, tmp_path / "log", tmp_path / "tidied") as one:
        first = psutil.Process(one.pid)
        one.kill()
        assert gone([first])
        one.start()
        one.wait_ready()
        assert one.pid != first.pid
        one.kill()
    assert not (tmp_path / "tidied").exists()


def test_a_program_that_ends_or_says_nothing_is_told_with_its_last_words(tmp_path: Path) -> None:
    broken = child("raise ValueError('no such thing')", tmp_path / "broken")
    with pytest.raises(ServerFailedError, match="the program ended before it was ready") as caught, broken:
        pass
    assert caught.value.tail == "ValueError: no such thing"
    silent = child("import time; time.sleep(600)", tmp_path / "silent")
    silent.start()
    with pytest.raises(ServerFailedError, match="the program did not become ready"):
        silent.wait_ready(0.2)
    silent.stop()


def test_ports_are_free_on_any_loopback_address() -> None:
    assert 20000 <= free_port("127.0.0.2") < 32768
