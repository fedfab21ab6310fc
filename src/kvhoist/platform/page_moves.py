"""Where the kernel keeps pages of this process's memory, and moving them to another memory node: Linux's move_pages."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from ctypes import c_int, c_long, c_void_p

PAGE_BYTES = 4096

NOT_TRIED = -(1 << 20)
"""What stands for a page that the kernel had not come to when the call ended: no errno."""

_MOVE_PAGES = 279
"""The system call, on x86-64, which every machine with AMD's GPUs for servers is."""

_ONLY_OURS = 2  # MPOL_MF_MOVE


def page_nodes(pages: Sequence[int]) -> list[int]:
    """Return for each address of a page the node that the kernel keeps it on, or a negative errno: -EFAULT where the
    kernel does not own it (or nothing is mapped), -ENOENT where nobody has touched it. Raises OSError."""
    return _move_pages(pages, None)


def move_pages(pages: Sequence[int], node: int) -> list[int]:
    """Ask the kernel to move pages to `node` and return its answer for each: the node, a negative errno, or NOT_TRIED.

    In a huge page only the first of its 4 KiB may be answered as moved; `page_nodes` tells where all of them are then.
    Raises OSError for a call that is refused as a whole.
    """
    return _move_pages(pages, [node] * len(pages))


def _move_pages(pages: Sequence[int], nodes: Sequence[int] | None) -> list[int]:
    count = len(pages)
    addresses = (c_void_p * count)(*pages)
    targets = None if nodes is None else (c_int * count)(*nodes)
    answers = (c_int * count)(*[NOT_TRIED] * count)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(c_long(_MOVE_PAGES), c_int(0), c_long(count), addresses, targets, answers, c_int(_ONLY_OURS)) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return list(answers)


def answer_name(answer: int) -> str:
    """Return an answer of the functions here as a person reads it: "node 1", "EFAULT"."""
    if answer >= 0:
        return f"node {answer}"
    return "not tried" if answer == NOT_TRIED else errno.errorcode.get(-answer, str(answer))
