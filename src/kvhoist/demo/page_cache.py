"""The kernel's page cache, told to forget, so that reads come from the disk."""

from __future__ import annotations

import os
from pathlib import Path


def drop_page_cache(folder: Path) -> int:
    """Have the kernel forget the cached contents of all files below `folder` and return their bytes, so that the next
    reads come from the disk. Dirty pages cannot be dropped, hence they are written first."""
    num_bytes = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            num_bytes += os.fstat(fd).st_size
        finally:
            os.close(fd)
    return num_bytes
