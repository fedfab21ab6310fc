"""Memory on page boundaries that is this process's alone: what `mmap` makes by default, a forked child shares."""

from __future__ import annotations

import mmap


def private_memory(num_bytes: int) -> mmap.mmap:
    """Map zeros, which a forked child gets a copy of. Raises OSError (ENOMEM), OverflowError."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
