"""The client: what runs on this machine for this user, and asking one of it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhoist.errors import StorageError
from kvhoist.runtime.folder import check_private, sockets
from kvhoist.runtime.wire import receive_line, send_line

_STATUS_S = 3.0
_SEND_S = 5.0


@dataclass(frozen=True, slots=True)
class Running:
    """A cache that runs: its socket, and its status, or why it did not tell (a process that was stopped, say)."""

    path: Path
    status: Mapping[str, Any]
    problem: str = ""

    @property
    def pid(self) -> int:
        return int(self.path.stem.partition("-")[0])

    @property
    def cache(self) -> int:
        """Which cache of the process it is."""
        return int(self.path.stem.partition("-")[2])


def running(folder: Path) -> list[Running]:
    """Return the caches with a socket in `folder`. Raises ConfigError where others could have made these sockets."""
    if not folder.exists():
        return []
    check_private(folder)
    return [_look(path) for path in sockets(folder)]


def ask(path: Path, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Send a request to a server and return its result. Raises StorageError with what it answers, or where it has not
    answered after `timeout_s`."""
    try:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(_SEND_S)
            peer.connect(str(path))
            send_line(peer, request, _SEND_S)
            answer = receive_line(peer, timeout_s)
    except TimeoutError as error:
        raise StorageError(
            f"process {path.stem.partition('-')[0]} has not answered", got=str(error), remedy="It may still act."
        ) from error
    except (OSError, ValueError) as error:
        raise StorageError("the process cannot be asked", got=f"{path}: {error}") from error
    if answer.get("ok") is not True:
        raise StorageError(str(answer.get("error", "no reason given")))
    result = answer.get("result")
    return result if isinstance(result, dict) else {}


def _look(path: Path) -> Running:
    try:
        return Running(path, ask(path, {"do": "status"}, _STATUS_S))
    except StorageError as error:
        return Running(path, {}, str(error))
