"""Memory on page boundaries that is this process's alone: what `mmap` makes by default, a forked child shares."""

from __future__ import annotations

import mmap
from contextlib import suppress

_MADV_WIPEONFORK = 18  # linux/mman.h; Python has no name for it


def private_memory(num_bytes: int) -> mmap.mmap:
    """Map zeros, in whose place a forked child has zeros again. Raises OSError (ENOMEM), OverflowError.

    Were they copied on the next write, as others are after a fork, that write could lose its page to the child while a
    device or a disk still moves bytes to or from it (open(2) on O_DIRECT), and a fork would take as long as it has
    pages to mark.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # before Linux 4.14: a copy
        memory.madvise(_MADV_WIPEONFORK)
    return memory
