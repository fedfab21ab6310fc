"""A Mooncake cluster on this machine's loopback addresses: a master, and on each of two hosts a lender of memory."""

from __future__ import annotations

import socket
from pathlib import Path

from kvhoist.demo.child import ChildProcess, free_port, stop_all
from kvhoist.storage.mooncake.programs import program

HOSTS = ("127.0.0.1", "127.0.0.2")
"""In the place of two machines."""

_START_S = 30.0


class Cluster:
    """The processes that hold the shared pages. What they hold outlives the engines, and goes with the master.

    Raises MissingDependencyError where Mooncake's programs are not installed.
    """

    def __init__(self, logs: Path, segment_bytes: int) -> None:
        port = free_port(HOSTS[0])
        self.address = f"{HOSTS[0]}:{port}"
        command = [
            *(program("mooncake_master"), f"--rpc_address={HOSTS[0]}", f"--rpc_port={port}"),
            f"--metrics_port={free_port(HOSTS[0])}",
        ]
        self.master = _child("mooncake_master", command, logs / "mooncake-master.log", (HOSTS[0], port))
        self._lenders = [self._lender(host, logs, segment_bytes) for host in HOSTS]

    def url(self, host: str) -> str:
        """Return the store's address for an engine on `host`, which lends no memory itself."""
        return f"mooncake:{self.address}?segment=0&host={host}"

    def start(self) -> None:
        """Start all, one after the other. Raises ServerFailedError."""
        for child in (self.master, *self._lenders):
            child.start()
            child.wait_ready(_START_S)

    def restart_master(self) -> None:
        """Start the master again, which was killed: it remembers nothing."""
        self.master.start()
        self.master.wait_ready(_START_S)

    def stop(self) -> None:
        stop_all([self.master, *self._lenders])

    def _lender(self, host: str, logs: Path, segment_bytes: int) -> ChildProcess:
        port = free_port(host)
        command = [
            *(program("mooncake_client"), f"--master_server_address={self.address}"),
            *("--metadata_server=P2PHANDSHAKE", f"--host={host}", f"--port={port}"),
            f"--global_segment_size={segment_bytes}",
        ]
        return _child(f"mooncake_client on {host}", command, logs / f"mooncake-client-{host}.log", (host, port))


def _child(name: str, command: list[str], log: Path, address: tuple[str, int]) -> ChildProcess:
    return ChildProcess(name, command, log, lambda: _listens(address))


def _listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return False
    return True
