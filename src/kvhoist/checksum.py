"""The checksum of a page's bytes, taken while other threads run."""

from __future__ import annotations

import xxhash


def checksum(data: memoryview) -> bytes:
    """Return the XXH3-128 of `data`, 16 bytes big-endian. By an object, whose `update` gives the GIL up: the one-shot
    functions of xxhash before 4.0 keep it, a millisecond for a page of some MiB, and with it the engine's thread."""
    state = xxhash.xxh3_128()
    state.update(data)
    return state.digest()
