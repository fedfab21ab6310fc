"""The folder of a FileStore: whose it is, which version, and what its namespaces stand for."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvhoist.errors import StorageError, StoreFormatError, StoreUnavailableError
from kvhoist.storage.file.segment import is_no_space, sync_folder
from kvhoist.storage.notes import parse, read_note

_log = logging.getLogger(__name__)

FORMAT_VERSION = 1
FORMAT_FILE = "kvhoist-store.json"

_FORMAT_NAME = "kvhoist-store"
_HARMLESS = {"lost+found"}
_UNFINISHED = ".kvhoist-"
_MAX_JSON_BYTES = 1 << 20
_SEGMENT_ID = re.compile("[0-9a-f]{32}")
_FOLDER_MODE = 0o700


class Folder:
    """A folder that is, or just became, a store of FORMAT_VERSION. `store_id`: 16 random bytes, made with it.

    What is made in it is its user's alone, or its group's too where the group can write to it (`file_mode`, less the
    umask).
    """

    def __init__(self, path: Path, store_id: bytes) -> None:
        self.path = path
        self.store_id = store_id
        self.segments = path / "segments"
        self._namespaces = path / "namespaces"
        self.file_mode, self._folder_mode = _modes_in(path)

    @classmethod
    def open(cls, path: Path, *, read_only: bool) -> Folder:
        """Open the store in `path`, or make one where there is nothing (not with `read_only`). A folder that is made
        here is its user's alone, since pages tell what was said; one that is there keeps its mode.

        Raises StorageError for a file, or a folder with other things in it; StoreFormatError for another version;
        StoreUnavailableError for a folder that cannot be read, or not written. All of them before anything is changed.
        """
        try:
            path = path.absolute()
            _check_place(path, read_only=read_only)
            if not read_only:
                _make_durably(path)
                _publish_format_file(path)
            folder = cls(path, _read_format_file(path / FORMAT_FILE))
            if not read_only:
                folder._make_subfolders()
            if path.stat().st_mode & stat.S_IWOTH:
                _log.warning("every user of this machine can write to %s: without a secret they can plant pages", path)
        except OSError as error:
            raise _unavailable(path, error, read_only=read_only) from error
        except ValueError as error:  # a NUL, or a lone surrogate
            raise StorageError(f"{str(path)!r} cannot be the path of a folder", got=error) from error
        return folder

    @classmethod
    def check(cls, path: str | Path) -> None:
        """Raise what `open` raises where there is no store in `path`; make none."""
        cls.open(Path(path), read_only=True)

    def note_namespace(self, digest: bytes, fields: Mapping[str, str]) -> None:
        """Keep the fields in `namespaces/<digest>.json`, whole or not at all. Raises StoreUnavailableError."""
        target = self._namespaces / f"{digest.hex()}.json"
        if _read_note(target) is not None:
            return
        try:
            _write_whole(target, {"digest": digest.hex(), "fields": dict(fields)}, self.file_mode)
        except OSError as error:
            raise _unavailable(self.path, error, read_only=False) from error

    def namespaces(self) -> dict[bytes, dict[str, str]]:
        """Return the fields of every namespace noted here; files that cannot be read as such are skipped."""
        notes = (_read_note(path) for path in sorted(self._namespaces.glob("*.json")))
        return {digest: fields for note in notes if note is not None for digest, fields in [note]}

    def segment_files(self, suffix: str) -> list[Path]:
        """Return what lies under the name of a segment, whatever it is; other names are left alone. Raises OSError."""
        return [Path(entry.path) for entry in os.scandir(self.segments) if _is_segment_name(entry.name, suffix)]

    def forget_namespace(self, digest: bytes) -> None:
        """Remove the note, if there is one. Raises StoreUnavailableError."""
        try:
            (self._namespaces / f"{digest.hex()}.json").unlink(missing_ok=True)
        except OSError as error:
            raise _unavailable(self.path, error, read_only=False) from error

    def _make_subfolders(self) -> None:
        for folder in (self.segments, self._namespaces):
            folder.mkdir(mode=self._folder_mode, exist_ok=True)
        sync_folder(self.path)
        probe = self.segments / f"{_UNFINISHED}{secrets.token_hex(8)}"
        fd = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, self.file_mode)
        try:  # a file system that is mounted read-only, or has no locks, shows only when tried
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)
            probe.unlink(missing_ok=True)


def _modes_in(path: Path) -> tuple[int, int]:
    """Return the modes of files and of folders that are made in a store's folder."""
    return (0o660, 0o770) if path.stat().st_mode & stat.S_IWGRP else (0o600, _FOLDER_MODE)


def _is_segment_name(name: str, suffix: str) -> bool:
    return name.endswith(suffix) and _SEGMENT_ID.fullmatch(name.removesuffix(suffix)) is not None


def _check_place(path: Path, *, read_only: bool) -> None:
    if not path.exists():
        if read_only:
            raise StorageError(f"there is no store at {path}", remedy="Check the path, or open it without read_only.")
        return
    if not path.is_dir():
        raise StorageError(f"{path} is not a folder", got="a file", remedy="Give a folder of its own to the store.")
    names = {entry.name for entry in path.iterdir()}
    others = sorted(name for name in names - _HARMLESS if not name.startswith(_UNFINISHED))
    if FORMAT_FILE not in names and (others or read_only):
        raise StorageError(
            f"{path} is not a kvhoist store",
            got="a folder with "
            + (", ".join(others[:5]) + (", …" if len(others) > 5 else "") if others else "nothing"),
            expected=f"an empty folder, or one that holds {FORMAT_FILE}",
            remedy="Nothing was changed. Give a new or empty folder.",
        )


def _make_durably(path: Path) -> None:
    """Make the folder and those above it that are missing, and let their names survive a power cut where their own
    folder can be read."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):  # one by one: whoever may write above a folder may put another in its place
        folder.mkdir(mode=_FOLDER_MODE, exist_ok=True)
    for folder in missing:
        with contextlib.suppress(OSError):
            sync_folder(folder.parent)


def _write_durably(path: Path, text: str, mode: int) -> None:
    """Write a new file whose name, once it is its own, is never that of bytes which were lost with the machine."""
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _publish_format_file(path: Path) -> None:
    target = path / FORMAT_FILE
    if target.exists():
        return
    mode, _ = _modes_in(path)
    unfinished = path / f"{_UNFINISHED}{secrets.token_hex(8)}"
    content = {"format": _FORMAT_NAME, "version": FORMAT_VERSION, "store_id": secrets.token_hex(16)}
    try:
        _write_durably(unfinished, json.dumps(content, indent=1) + "\n", mode)
        os.link(unfinished, target)  # unlike a rename, never replaces what another process just made
    except FileExistsError:
        pass
    finally:
        unfinished.unlink(missing_ok=True)


def _read_format_file(path: Path) -> bytes:
    """Return the store's id. Raises StoreFormatError."""
    try:
        content = _read_json(path)
        name, version = content["format"], content["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path) from error
    if name != _FORMAT_NAME or version != FORMAT_VERSION:
        raise StoreFormatError(
            f"the store in {path.parent} has another format",
            got=f"{name} version {version}",
            expected=f"{_FORMAT_NAME} version {FORMAT_VERSION}",
            remedy="Nothing was changed. Open it with the kvhoist release that wrote it, or give another folder; "
            "a cache that is deleted is recomputed.",
        )
    try:
        store_id = bytes.fromhex(content["store_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path) from error
    if len(store_id) != 16:
        raise _damaged(path)
    return store_id


def _read_note(path: Path) -> tuple[bytes, dict[str, str]] | None:
    try:
        return read_note(path.stem, _read_json(path)["fields"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_json(path: Path) -> Any:
    """Return what a file holds that anyone may have put there. Raises ValueError for what is no file of sound JSON."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:  # it may be a pipe
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("no regular file")
        text = file.read(_MAX_JSON_BYTES + 1)
    if len(text) > _MAX_JSON_BYTES:
        raise ValueError(f"more than {_MAX_JSON_BYTES} bytes")
    return parse(text)


def _write_whole(target: Path, content: object, mode: int) -> None:
    unfinished = target.with_name(f"{_UNFINISHED}{secrets.token_hex(8)}")
    try:
        _write_durably(unfinished, json.dumps(content, indent=1, sort_keys=True) + "\n", mode)
        os.rename(unfinished, target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _damaged(path: Path) -> StoreFormatError:
    return StoreFormatError(
        f"{path} cannot be read as the description of a store",
        expected=f"JSON with format {_FORMAT_NAME!r}, version {FORMAT_VERSION} and a store_id",
        remedy="Nothing was changed. Restore the file, or give another folder.",
    )


def _unavailable(path: Path, error: OSError, *, read_only: bool) -> StoreUnavailableError:
    what = "read" if read_only else "written"
    if read_only:
        remedy = "Check its owner and mode."
    elif is_no_space(error):
        remedy = "Free some space, or give a folder on another disk."
    else:
        remedy = "Check its owner and mode, or open it with read_only=True (?read_only=true) to read only."
    return StoreUnavailableError(f"{path} cannot be {what}", got=error.strerror or str(error), remedy=remedy)


def delete_orphan(path: Path) -> bool:
    """Delete a file that no process holds the lock of; tell whether it is gone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
