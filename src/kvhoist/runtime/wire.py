"""What passes over the socket: one line of JSON each way, bounded in length and time."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

MAX_LINE_BYTES = 64 << 10
"""More than any request or answer needs."""


def send_line(peer: socket.socket, message: Mapping[str, Any], timeout_s: float) -> None:
    """Send `message`. Raises OSError (TimeoutError after `timeout_s`)."""
    peer.settimeout(timeout_s)
    peer.sendall(json.dumps(message).encode() + b"\n", socket.MSG_NOSIGNAL)


def receive_line(peer: socket.socket, timeout_s: float) -> dict[str, Any]:
    """Return the object that the peer sends, however slowly, within `timeout_s`. Raises OSError (TimeoutError), and
    ValueError for what is no line of JSON with an object, or too long."""
    deadline = time.monotonic() + timeout_s
    data = b""
    while b"\n" not in data:
        peer.settimeout(max(1e-6, deadline - time.monotonic()))
        try:
            more = peer.recv(MAX_LINE_BYTES + 1 - len(data))
        except TimeoutError as error:
            raise TimeoutError(f"no whole line within {timeout_s:g} s") from error
        if not more:
            raise ValueError("the line has no end")
        data += more
        if len(data) > MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
    try:
        message = json.loads(data.partition(b"\n")[0])
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("no JSON object")
    return message
