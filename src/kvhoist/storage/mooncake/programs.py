"""Mooncake's own programs, as its wheel installs them."""

from __future__ import annotations

import shutil
import sysconfig

from kvhoist.errors import MissingDependencyError


def program(name: str) -> str:
    """Return the path of `mooncake_master` or `mooncake_client`: beside this Python, or on PATH. Raises
    MissingDependencyError."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        raise MissingDependencyError(
            f"there is no {name}",
            remedy="Install kvhoist[mooncake] (without CUDA: mooncake-transfer-engine-non-cuda).",
        )
    return found
