"""Whether the master answers: told at once by a connection to it, with bounded back-off while it is away."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from kvhoist.errors import StoreUnavailableError

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 5.0
_CONNECT_S = 1.0


class MasterWatch:
    """A TCP connection to the master on which nothing is ever said: the system closes it when the master ends.

    The engine itself takes seconds for a call to a master that is gone. `check` costs a system call, and raises at once
    while the master is away; the back-off bounds how often somebody tries. Thread-safe.
    """

    def __init__(self, address: tuple[str, int], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Connect. Raises StoreUnavailableError."""
        self._address = address
        self._clock = clock
        self._lock = threading.Lock()
        self._delay_s = 0.0
        self._retry_at = 0.0
        try:
            self._socket: socket.socket | None = self._connect()
        except OSError as error:
            raise self._unavailable(str(error)) from error
        self.local_host: str = self._socket.getsockname()[0]

    def check(self) -> bool:
        """Return where the master may be called, and whether it has just been found again. Raises
        StoreUnavailableError, at once or after one short attempt."""
        with self._lock:
            if self._socket is not None and _is_open(self._socket):
                return False
            self._drop()
            now = self._clock()
            if now < self._retry_at:
                raise self._unavailable(f"gone, tried again in {self._retry_at - now:.1f} s")
            self._back_off(now)
        try:  # without the lock: others are told at once meanwhile
            fresh = self._connect()
        except OSError as error:
            raise self._unavailable(str(error)) from error
        with self._lock:
            self._drop()
            self._socket = fresh
        return True

    def failed(self) -> None:
        """A call did not reach the master: keep others from trying for a while."""
        with self._lock:
            self._drop()
            self._back_off(self._clock())

    def answered(self) -> None:
        """A call reached the master."""
        self._delay_s = 0.0

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _connect(self) -> socket.socket:
        connected = socket.create_connection(self._address, timeout=_CONNECT_S)
        connected.setblocking(False)
        return connected

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _back_off(self, now: float) -> None:
        self._delay_s = min(max(2 * self._delay_s, FIRST_DELAY_S), MAX_DELAY_S)
        self._retry_at = now + self._delay_s

    def _unavailable(self, why: str) -> StoreUnavailableError:
        return StoreUnavailableError(
            "the Mooncake master cannot be reached",
            got=f"{self._address[0]}:{self._address[1]}: {why}",
            remedy="Start mooncake_master there; stores that were open find it again by themselves.",
        )


def _is_open(connected: socket.socket) -> bool:
    try:
        return bool(connected.recv(1, socket.MSG_PEEK))
    except (BlockingIOError, InterruptedError):
        return True
    except OSError:
        return False
