"""Reads and writes of many buffers at one offset, whole or not at all. The system calls release the GIL."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvhoist.storage.base import Buffer

MAX_BUFFERS = 1024
"""IOV_MAX of Linux: the most buffers that one preadv or pwritev takes."""


def write_all(fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write the buffers one after the other from `offset` on. Raises OSError; some bytes may have been written then."""
    left = list(buffers)
    while left:
        written = os.pwritev(fd, left[:MAX_BUFFERS], offset)
        offset += written
        left = _after(left, written)


def read_all(fd: int, buffers: Sequence[Buffer], offset: int) -> bool:
    """Fill the buffers one after the other from `offset` on; False where the file ends before. Raises OSError."""
    left = list(buffers)
    while left:
        num_read = os.preadv(fd, left[:MAX_BUFFERS], offset)
        if num_read == 0:
            return False
        offset += num_read
        left = _after(left, num_read)
    return True


def _after(buffers: list[Buffer], num_bytes: int) -> list[Buffer]:
    """Return what is left of the buffers behind their first `num_bytes` bytes."""
    for i, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[i + 1 :]]
        num_bytes -= len(buffer)
    return []
