"""How much disk a FileStore takes, and in what pieces."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

DEFAULT_CAPACITY_BYTES = 32 << 30
_MIN_SEGMENT_BYTES = 64 << 20
_SEGMENTS = 64


def default_capacity_bytes(folder: Path) -> int:
    """Return the least of 32 GiB and half of what the store could have: free space and what it holds already."""
    segments = folder / "segments"
    held = sum(map(_bytes_of, os.scandir(segments))) if segments.exists() else 0
    return max(1, min(DEFAULT_CAPACITY_BYTES, (shutil.disk_usage(folder).free + held) // 2))


def _bytes_of(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:  # another process gave it up meanwhile
        return 0


def segment_bytes_for(capacity_bytes: int) -> int:
    """Return how long new segments are: a 64th of capacity, so that a segment given up is little and files are few; yet
    64 MiB where capacity is small, so that reads are long; but never more than an 8th."""
    return max(capacity_bytes // _SEGMENTS, min(_MIN_SEGMENT_BYTES, capacity_bytes // 8))
