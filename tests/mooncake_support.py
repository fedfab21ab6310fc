"""A real mooncake_master for tests, on free ports of this machine, killed when they end."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvhoist.storage.mooncake.programs import program

DEADLINE_S = 30.0


class Master:
    """A mooncake_master process that can be killed, stopped, and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self._metrics_port = _free_ports(2)
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, **options: object) -> str:
        """The store's address for this master, with little memory unless told otherwise."""
        chosen = {"segment": "64MiB", "bounce": "8MiB", "timeout_s": 2, **options}
        return f"mooncake:{self.address}?" + "&".join(f"{name}={value}" for name, value in chosen.items())

    def start(self) -> None:
        command = [
            program("mooncake_master"),
            f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={self._metrics_port}",
        ]
        with (self.folder / "mooncake_master.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        poll(self._answers, f"mooncake_master on {self.address} (its log: {log.name})")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        assert self.process is not None
        freeze(self.process)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"mooncake_master ended with {self.process.returncode}"
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        return False


@contextlib.contextmanager
def running_master(folder: Path) -> Iterator[Master]:
    master = Master(folder)
    try:
        yield master
    finally:
        master.kill()


def poll(done: object, what: str, deadline_s: float = DEADLINE_S) -> None:
    """Call `done` until it is true; fail after the deadline, naming what was waited for."""
    assert callable(done)
    deadline = time.monotonic() + deadline_s
    while not done():
        assert time.monotonic() < deadline, f"waited {deadline_s:.0f} s for {what}"
        time.sleep(0.02)


def freeze(process: subprocess.Popen[Any]) -> None:
    """Stop a process, and wait until each of its threads stands still."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")

    def stands_still() -> bool:
        with contextlib.suppress(OSError):  # one ends meanwhile
            return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir())
        return False

    poll(stands_still, f"process {process.pid} to stop")


def run_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start another process of this Python, to be spoken to by its pipes."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_:
        bound = [open_.enter_context(socket.socket()) for _ in range(count)]
        for one in bound:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in bound]
