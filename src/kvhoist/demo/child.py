"""A program as a child process: started, watched until it answers, ended whole; several of them ended at once."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvhoist.demo.signals import signals_held
from kvhoist.errors import KvhoistError

_TAIL_LINES = 25
_LOG_PREFIX = re.compile(r"^\(.*? pid=\d+\) (?:\w+ [^\]]*\] ?)?")
_ERROR = re.compile(r"kvhoist cannot start: |[\w.]+(?:Error|Exception): ")
_DETAIL_LINES = 3
_READY_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 30.0
_STOP_UNREADY_S = 1.0
"""For a program that has not answered yet: it has nothing to drain, and vLLM hears no SIGTERM while it starts."""
_HELPERS_TIMEOUT_S = 10.0
_TRACKER, _TRACKER_TIMEOUT_S = b"multiprocessing.resource_tracker", 2.0
_PORTS = range(20000, 32768)
"""Below those that Linux gives to outgoing connections and to whoever asks for any."""

POLL_S = 0.1


class ServerFailedError(KvhoistError):
    """A program ended, or did not answer in time. `tail` holds the last lines of its log."""

    def __init__(self, what: str, *, tail: str = "", **parts: Any) -> None:
        super().__init__(what, **parts)
        self.tail = tail


class ChildProcess:
    """A process in a group of its own, so that a terminal's Ctrl-C reaches us alone and we stop it; not in a session,
    which Linux schedules as one task beside others: on few cores servers would starve each other.

    Use it as a context manager: entering waits until `answers` says so, leaving ends every process of it.
    `name` is what errors call it; its messages go to `log`. Raises ServerFailedError where it does not come up.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, answers: Callable[[], bool]) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._answers = answers
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._told_to_end = False
        self.ready_seconds = 0.0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process without waiting for it. Its messages go to the log, from an empty file on."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._started_at = time.perf_counter()
        self._told_to_end, self.ready_seconds = False, 0.0
        with self.log.open("wb") as log, signals_held():
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )

    def wait_ready(self, timeout_s: float = _READY_TIMEOUT_S) -> None:
        """Wait until the program answers, `timeout_s` since its start at most."""
        assert self._process is not None
        while not self._answers():
            status = self._process.poll()
            if status is not None:
                raise self.failed(f"{self.name} ended before it was ready", f"exit status {status}")
            if time.perf_counter() - self._started_at > timeout_s:
                raise self.failed(f"{self.name} did not become ready", f"no answer in {timeout_s:.0f} s")
            time.sleep(POLL_S)
        self.ready_seconds = time.perf_counter() - self._started_at

    def tell_to_end(self) -> None:
        """Send SIGTERM, once, without waiting."""
        if self._process is not None and not self._told_to_end:
            self._told_to_end = True
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """End the program: SIGTERM, and what is left of it after `timeout_s` (less where it never answered) is killed.
        Idempotent.

        Its helpers (the tracker of shared memory, workers) are given a moment longer than itself, to clean up.
        """
        self.tell_to_end()
        process, self._process = self._process, None
        if process is None:
            return
        if not self.ready_seconds:
            timeout_s = min(timeout_s, _STOP_UNREADY_S)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
                _await_end(process.pid, min(timeout_s, _HELPERS_TIMEOUT_S))
        finally:
            _kill_group(process)

    def kill(self) -> None:
        """End every process of the program at once, as a machine that fails would."""
        process, self._process = self._process, None
        if process is not None:
            _kill_group(process)

    def log_tail(self) -> str:
        """Return the lines of the log that name an error, or where none does, its last ones."""
        with suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
            return "\n".join((_errors(lines) or lines)[-_TAIL_LINES:])
        return ""

    def failed(self, what: str, got: str) -> ServerFailedError:
        """Return the error that says so and where the messages are."""
        error = ServerFailedError(what, got=got, remedy=f"Its messages are in {self.log}.", tail=self.log_tail())
        error.add_note(error.tail)
        return error

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def stop_all(children: Sequence[ChildProcess]) -> None:
    """Stop them, the last one first, but tell all of them before waiting for any."""
    for child in reversed(children):
        child.tell_to_end()
    for child in reversed(children):
        child.stop()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port that likely stays so until a program gets to it: the system hands out none of these."""
    ports = random.SystemRandom().sample(_PORTS, 100)
    for port in ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise KvhoistError(f"no free port on {host}", got=f"100 tries in {_PORTS.start} to {_PORTS.stop - 1}")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group, Python's trackers last: they remove what the others leave in /dev/shm."""
    for pid, command in _group(process.pid):
        if _TRACKER not in command:
            _kill_member(pid, process.pid)
    process.wait()
    _await_end(process.pid, _TRACKER_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _kill_member(pid: int, group: int) -> None:
    """Kill a process that still is of the group: its number may have become another's, or that of another's thread."""
    with suppress(OSError):  # it has ended
        descriptor = os.pidfd_open(pid)
        try:
            if os.getpgid(pid) == group:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _errors(lines: Sequence[str]) -> list[str]:
    """Return what a log says of errors, each once: the line that names it, and the indented ones below it."""
    found: dict[str, None] = {}
    details = 0
    for line in lines:
        text = _LOG_PREFIX.sub("", line)
        details = _DETAIL_LINES if _ERROR.match(text) else max(0, details - 1) if text.startswith(" ") else 0
        if details:
            found[text] = None
    return list(found)


def _await_end(group: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while _group(group) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _group(group: int) -> list[tuple[int, bytes]]:
    """Return ids and command lines of the processes of a process group that run. A zombie does not: nobody here can
    reap another's child."""
    running = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            state, _parent, found = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state != "Z":
                running.append((int(folder.name), (folder / "cmdline").read_bytes()))
    return running
