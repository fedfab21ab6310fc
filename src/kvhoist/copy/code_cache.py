"""Compiled kernels on disk, by content. Losing any of it costs a compilation; trusting the wrong file costs more.

An entry is one file, `<key in hex>.bin`: a header (magic, format version, key, image length, SHA-256 of the image) and
the image. It appears by one rename, so that processes that compile the same thing do each other no harm.

What an entry holds runs on the GPU with the rights of this process. Hence one is used only where its file is regular,
no link, owned by this process's user and writable by nobody else; any other is compiled anew and replaced. The checksum
is against accidents, the owner against people. Nothing is ever removed: an entry has some 10 KB, and a folder may be
deleted at any time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvhoist.settings import Settings

_log = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Part of every key: entries of another version are never looked at."""

_MAGIC = b"KVHCODE\0"
_HEADER = struct.Struct("<8sI32sQ32s")
_MAX_IMAGE_BYTES = 64 << 20
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def code_key(*, source: str, name: str, options: Sequence[str], compiler: str) -> bytes:
    """Return the 32-byte key of what `compiler` (its name and build) makes of `source` under `options`, which name the
    architecture. The file's `name` counts too: `__FILE__` puts it into the code. What included files hold does not.
    """
    digest = hashlib.sha256()
    for part in (f"{FORMAT_VERSION}", compiler, name, source, f"{len(options)}", *options):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


class CodeCache:
    """A folder of entries. Thread-safe, and safe between processes. No method raises for what is on the disk: a folder
    that cannot be read or written is told once, at info, and costs time only."""

    def __init__(self, folder: Path | None = None) -> None:
        """Use `folder`, or `kernels` in the settings' cache folder. Made at the first `store`, for its user alone (mode
        0700, entries 0600); one that is there keeps its mode.

        Raises ConfigError where `folder` is None and the environment's settings cannot work.
        """
        self.folder = Settings.from_env().cache_dir / "kernels" if folder is None else folder
        self._is_told = False

    def load(self, key: bytes) -> bytes | None:
        """Return the image stored under `key`; None where there is none that can be trusted."""
        path = self._path(key)
        try:
            # Not to follow a link, nor to wait for the writer of a pipe.
            entry = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if why := _why_distrusted(os.fstat(entry)):
                    _log.warning("%s is not used: %s. It is compiled anew and replaced where that can be", path, why)
                    return None
                with open(entry, "rb", closefd=False) as file:
                    data = file.read(_HEADER.size + _MAX_IMAGE_BYTES + 1)
            finally:
                os.close(entry)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            self._tell("read", error)
            return None
        image = _image_of(data, key)
        if image is None:
            _log.info("%s is damaged: it is compiled anew and replaced", path)
        return image

    def store(self, key: bytes, image: bytes) -> None:
        """Publish `image` under `key`, whole or not at all, in place of what is there."""
        header = _HEADER.pack(_MAGIC, FORMAT_VERSION, key, len(image), hashlib.sha256(image).digest())
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, draft = tempfile.mkstemp(prefix=".draft-", dir=self.folder)  # of mode 0600
            try:
                with open(descriptor, "wb") as file:
                    file.write(header + image)
                # Not synced first: what a power cut leaves of the file fails its checksum.
                os.replace(draft, self._path(key))
            except BaseException:
                Path(draft).unlink(missing_ok=True)
                raise
        except (OSError, ValueError) as error:
            self._tell("written", error)

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}.bin"

    def _tell(self, what: str, error: Exception) -> None:
        if not self._is_told:
            self._is_told = True
            _log.info("compiled kernels in %s cannot be %s (%s): processes compile their own", self.folder, what, error)


def _why_distrusted(status: os.stat_result) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return "no regular file"
    if status.st_uid != os.geteuid():
        return f"owned by user {status.st_uid}, not {os.geteuid()}"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"others may write it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _image_of(data: bytes, key: bytes) -> bytes | None:
    """Return the image of an entry's bytes; None for those of anything else."""
    if len(data) < _HEADER.size:
        return None
    image = data[_HEADER.size :]
    expected = _HEADER.pack(_MAGIC, FORMAT_VERSION, key, len(image), hashlib.sha256(image).digest())
    return image if data.startswith(expected) else None
