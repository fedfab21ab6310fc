"""Reads and writes of many buffers at one offset. The system calls release the GIL."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from kvhoist.storage.base import Buffer

MAX_BUFFERS = 1024
"""IOV_MAX of Linux: the most buffers that one preadv or pwritev takes."""


def write_all(fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write the buffers one after the other from `offset` on. Raises OSError; some bytes may have been written then."""
    if move(os.pwritev, fd, buffers, offset) < sum(map(len, buffers)):
        raise OSError(errno.EIO, "the file system wrote nothing and gave no reason")


def read_all(fd: int, buffers: Sequence[Buffer], offset: int) -> bool:
    """Fill the buffers one after the other from `offset` on; False where the file ends before. Raises OSError."""
    return move(os.preadv, fd, buffers, offset) == sum(map(len, buffers))


def move(
    call: Callable[[int, list[Buffer], int], int], fd: int, buffers: Sequence[Buffer], offset: int, unit_bytes: int = 1
) -> int:
    """Repeat `call` (`os.preadv`, `os.pwritev`) until the buffers are moved, or a call moves less than a unit.

    Returns the bytes that were moved. After a short call it goes on from a multiple of `unit_bytes`. Raises OSError.
    """
    left = list(buffers)
    moved = 0
    while left:
        num_bytes = call(fd, left[:MAX_BUFFERS], offset + moved)
        num_bytes -= num_bytes % unit_bytes
        if num_bytes == 0:
            break
        moved += num_bytes
        left = _after(left, num_bytes)
    return moved


def _after(buffers: list[Buffer], num_bytes: int) -> list[Buffer]:
    """Return what is left of the buffers behind their first `num_bytes` bytes."""
    for i, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[i + 1 :]]
        num_bytes -= len(buffer)
    return []
