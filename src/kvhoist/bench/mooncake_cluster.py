"""A Mooncake Store on this machine's loopback, for benchmarks: a master, and a process that lends memory."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO

from kvhoist.errors import MissingDependencyError, StoreUnavailableError
from kvhoist.storage.mooncake import MooncakeOptions
from kvhoist.storage.mooncake.programs import program

_START_S = 20.0
_LENDER = """
import sys
from kvhoist.storage import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
store.close()
"""


class Cluster:
    """A mooncake_master that can be killed, stopped and brought back; `options`: how this process reaches it."""

    def __init__(self, log: IO[bytes]) -> None:
        self._port, self._metrics_port = _free_port(), _free_port()
        self._log = log
        self.options = MooncakeOptions(f"127.0.0.1:{self._port}", segment=0)
        self.start()

    def start(self) -> None:
        """Start the master and wait until it answers. Raises StoreUnavailableError where it does not."""
        port, metrics_port = f"--rpc_port={self._port}", f"--metrics_port={self._metrics_port}"
        command = [program("mooncake_master"), port, "--rpc_address=127.0.0.1", metrics_port]
        self._master = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        _await_port(self._port)

    def kill(self) -> None:
        _end(self._master)

    def stop(self) -> None:
        """Let it hang, until `go_on`."""
        self._master.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._master.send_signal(signal.SIGCONT)


def has_mooncake() -> bool:
    """Tell whether a cluster can be started here."""
    try:
        program("mooncake_master")
    except MissingDependencyError:
        return False
    return True


@contextlib.contextmanager
def running_cluster(lent_bytes: int) -> Iterator[Cluster]:
    """Start a master and a process that lends memory, and end them. Raises MissingDependencyError without Mooncake,
    StoreUnavailableError where it does not start."""
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as undo:
        cluster = Cluster(log)
        undo.callback(cluster.kill)
        lender = subprocess.Popen(
            [sys.executable, "-c", _LENDER, f"mooncake:{cluster.options.master}?segment={lent_bytes}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        undo.callback(_end, lender)
        if lender.stdout is None or not lender.stdout.readline():
            lender.wait(_START_S)
            log.seek(0)
            told = log.read()[-500:].decode(errors="replace")
            raise StoreUnavailableError(f"the process that lends {lent_bytes} bytes did not start", got=told)
        yield cluster


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _await_port(port: int) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise StoreUnavailableError("mooncake_master did not start", got=error) from error
            time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port
