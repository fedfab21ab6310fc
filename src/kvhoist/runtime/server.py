"""The server in an engine's process: a thread that sleeps until somebody of the same user asks."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from kvhoist.affinity import start
from kvhoist.checks import seconds
from kvhoist.errors import ConfigError, KvhoistError
from kvhoist.runtime.folder import SUFFIX, open_folder, sockets
from kvhoist.runtime.wire import receive_line, send_line
from kvhoist.settings import Settings

_log = logging.getLogger(__name__)

_MOST_PEERS = 8
_PEER_S = 5.0
"""How long a peer may take to send its request, and to take its answer."""

_MAX_ADDRESS_CHARS = 4096
_MAX_ERROR_CHARS = 4096
_PEERCRED = struct.Struct("3i")  # pid, uid, gid
_numbers = itertools.count()
_open: weakref.WeakSet[RuntimeServer] = weakref.WeakSet()


class Served(Protocol):
    """What a server shows. Called from threads of its own, several at once; raises KvhoistError for people."""

    def status(self) -> Mapping[str, Any]:
        """Return what runs here and which store it has. Quick."""
        ...

    def attach(self, address: str) -> Mapping[str, Any]:
        """Attach the store at `address`, as long as that takes."""
        ...

    def detach(self, *, drain: bool, timeout_s: float) -> Mapping[str, Any]:
        """Detach the store, within about `timeout_s`."""
        ...


class RuntimeServer:
    """Answers one request a connection, for processes of the same user only. Whatever a peer sends, or fails to send,
    costs a thread for a few seconds. A forked child closes its copy of the socket."""

    def __init__(self, served: Served, folder: Path) -> None:
        """Listen in `folder`, as `PID-NUMBER.sock`. Raises ConfigError for a folder that is not private, OSError."""
        self._served = served
        self._pid = os.getpid()
        self._started = datetime.now().astimezone().isoformat(timespec="seconds")
        self._number = next(_numbers)
        self._peers = threading.BoundedSemaphore(_MOST_PEERS)
        self._closing = threading.Event()
        open_folder(folder)
        sockets(folder)
        self.path = folder / f"{self._pid}-{self._number}{SUFFIX}"
        unheard = self.path.with_suffix(".new")  # one that is found is listened to
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            unheard.unlink(missing_ok=True)
            self._listener.bind(str(unheard))
            self._listener.listen(4 * _MOST_PEERS)
            unheard.rename(self.path)
            self._thread = threading.Thread(target=self._accept, name="kvhoist-runtime", daemon=True)
            start(self._thread)
        except BaseException:
            self._listener.close()
            unheard.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
            raise
        _open.add(self)

    @classmethod
    def open(cls, served: Served) -> RuntimeServer | None:
        """Listen in the folder of the settings; None where they say so or it cannot be, which is logged: nothing else
        depends on it."""
        folder = Settings.from_env().runtime_dir
        if folder is None:
            return None
        try:
            return cls(served, folder)
        except (KvhoistError, OSError, RuntimeError) as error:
            _log.warning("kvhoist ps, attach and detach cannot reach this process: %s", error)
            return None

    def close(self) -> None:
        """Stop listening; requests under way end by themselves. Idempotent; in a forked child it leaves the file."""
        if self._closing.is_set() or os.getpid() != self._pid:
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._thread.join(_PEER_S)
        self._listener.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def close_copy(self) -> None:
        """In a forked child: close the descriptor, and leave the socket to the parent."""
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed; or no descriptor is left, which must not become a loop without rest
                self._closing.wait(1.0)
                continue
            if not self._peers.acquire(blocking=False):
                peer.close()
                continue
            try:
                start(threading.Thread(target=self._serve, args=(peer,), name="kvhoist-runtime-peer", daemon=True))
            except RuntimeError:  # no thread is left
                self._peers.release()
                peer.close()

    def _serve(self, peer: socket.socket) -> None:
        try:
            with peer, contextlib.suppress(OSError):  # a peer that has gone
                if _uid_of(peer) == os.geteuid():
                    send_line(peer, self._answer(peer), _PEER_S)
        finally:
            self._peers.release()

    def _answer(self, peer: socket.socket) -> dict[str, Any]:
        try:
            return {"ok": True, "result": dict(self._do(receive_line(peer, _PEER_S)))}
        except (KvhoistError, OSError, ValueError) as error:
            return {"ok": False, "error": (str(error) or type(error).__name__)[:_MAX_ERROR_CHARS]}
        except BaseException as error:  # of a stranger's store, say: whoever asks must hear of it
            _log.exception("a request over the runtime socket failed")
            return {"ok": False, "error": f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]}

    def _do(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        what = request.get("do")
        if what == "status":
            command = " ".join(sys.orig_argv)
            here = {"pid": self._pid, "cache": self._number, "started": self._started, "command": command[:200]}
            return {**here, **self._served.status()}
        if what == "attach":
            address = request.get("address")
            if not isinstance(address, str) or not 0 < len(address) <= _MAX_ADDRESS_CHARS:
                raise ConfigError("this is no address of a store", got=repr(address)[:100])
            return self._served.attach(address)
        if what == "detach":
            drain, timeout_s = request.get("drain", True), seconds("timeout_s", request.get("timeout_s", 60.0))
            if not isinstance(drain, bool) or timeout_s > 86400:
                raise ConfigError("these are no options of a detach", got=f"drain {drain!r}, timeout_s {timeout_s!r}")
            return self._served.detach(drain=drain, timeout_s=timeout_s)
        raise ConfigError("no such request", got=repr(what)[:100], choices=["status", "attach", "detach"])


def _uid_of(peer: socket.socket) -> int:
    _, uid, _ = _PEERCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
    return int(uid)


def _close_copies() -> None:
    for server in list(_open):
        server.close_copy()


os.register_at_fork(after_in_child=_close_copies)
