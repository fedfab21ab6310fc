"""The folder of sockets: nobody else's, and no socket in it outlives its process for long."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from kvhoist.errors import ConfigError

SUFFIX = ".sock"


def open_folder(folder: Path) -> Path:
    """Make the folder where it is missing and return it. Raises ConfigError where others could reach into it, OSError
    where it cannot be made."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Raise ConfigError unless the folder is this user's alone, OSError where there is none."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            "the folder of sockets is not private",
            got=f"{folder}, mode {stat.filemode(found.st_mode)} of user {found.st_uid}",
            expected=f"a folder of mode 0700 of user {os.geteuid()}",
            remedy="Remove it, or name another one in KVHOIST_RUNTIME_DIR.",
        )


def sockets(folder: Path) -> list[Path]:
    """Return the sockets of processes that live, and remove those whose process has died."""
    return [path for path in sorted(folder.glob(f"*{SUFFIX}")) if not _removed(path)]


def _removed(path: Path) -> bool:
    pid, _, _ = path.stem.partition("-")
    try:
        os.kill(int(pid), 0)
    except ValueError:
        return False
    except ProcessLookupError:  # or it lives in another pid namespace: then it answers
        with socket.socket(socket.AF_UNIX) as peer, contextlib.suppress(OSError):
            peer.settimeout(1.0)
            try:
                peer.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                return True
    except OSError:
        return False
    return False
