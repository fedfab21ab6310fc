"""What the system tells in files, on machines that have them."""

from __future__ import annotations

from pathlib import Path


def text_of(path: str | Path) -> str:
    """Return what a file of the system says; "" where it is absent on this system, or not shown in this container."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
