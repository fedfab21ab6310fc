"""The folder of a FileStore: whose it is, which version, and what its namespaces stand for."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from kvhoist.errors import StorageError, StoreFormatError, StoreUnavailableError
from kvhoist.storage.file.segment import sync_folder

FORMAT_VERSION = 1
FORMAT_FILE = "kvhoist-store.json"

_FORMAT_NAME = "kvhoist-store"
_HARMLESS = {"lost+found"}
_UNFINISHED = ".kvhoist-"


class Folder:
    """A folder that is, or just became, a store of FORMAT_VERSION. `store_id`: 16 random bytes, made with it."""

    def __init__(self, path: Path, store_id: bytes) -> None:
        self.path = path
        self.store_id = store_id
        self.segments = path / "segments"
        self._namespaces = path / "namespaces"

    @classmethod
    def open(cls, path: Path, *, read_only: bool) -> Folder:
        """Open the store in `path`, or make one where there is nothing (not with `read_only`).

        Raises StorageError for a file, or a folder with other things in it; StoreFormatError for another version;
        StoreUnavailableError for a folder that cannot be read, or not written. All of them before anything is changed.
        """
        path = path.absolute()
        try:
            _check_place(path, read_only=read_only)
            if not read_only:
                path.mkdir(parents=True, exist_ok=True)
                _publish_format_file(path)
            folder = cls(path, _read_format_file(path / FORMAT_FILE))
            if not read_only:
                folder._make_subfolders()
        except OSError as error:
            raise _unavailable(path, error, read_only=read_only) from error
        return folder

    @classmethod
    def check(cls, path: str | Path) -> None:
        """Raise what `open` raises where there is no store in `path`; make none."""
        cls.open(Path(path), read_only=True)

    def note_namespace(self, digest: bytes, fields: Mapping[str, str]) -> None:
        """Keep the fields in `namespaces/<digest>.json`, whole or not at all. Raises StoreUnavailableError."""
        target = self._namespaces / f"{digest.hex()}.json"
        if target.exists():
            return
        try:
            _write_whole(target, {"digest": digest.hex(), "fields": dict(fields)})
        except OSError as error:
            raise _unavailable(self.path, error, read_only=False) from error

    def namespaces(self) -> dict[bytes, dict[str, str]]:
        """Return the fields of every namespace noted here; files that cannot be read as such are skipped."""
        notes = (_read_note(path) for path in sorted(self._namespaces.glob("*.json")))
        return {digest: fields for note in notes if note is not None for digest, fields in [note]}

    def forget_namespace(self, digest: bytes) -> None:
        """Remove the note, if there is one."""
        (self._namespaces / f"{digest.hex()}.json").unlink(missing_ok=True)

    def _make_subfolders(self) -> None:
        for folder in (self.segments, self._namespaces):
            folder.mkdir(exist_ok=True)
        probe = self.segments / f"{_UNFINISHED}{secrets.token_hex(8)}"
        fd = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        try:  # a file system that is mounted read-only, or has no locks, shows only when tried
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)
            probe.unlink(missing_ok=True)


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


def _publish_format_file(path: Path) -> None:
    target = path / FORMAT_FILE
    if target.exists():
        return
    unfinished = path / f"{_UNFINISHED}{secrets.token_hex(8)}"
    content = {"format": _FORMAT_NAME, "version": FORMAT_VERSION, "store_id": secrets.token_hex(16)}
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    try:
        os.link(unfinished, target)  # unlike a rename, never replaces what another process just made
    except FileExistsError:
        pass
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path)


def _read_format_file(path: Path) -> bytes:
    """Return the store's id. Raises StoreFormatError."""
    try:
        content = json.loads(path.read_text())
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
        content = json.loads(path.read_text())
        digest = bytes.fromhex(path.stem)
        fields = {str(name): str(value) for name, value in content["fields"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return digest, fields


def _write_whole(target: Path, content: object) -> None:
    unfinished = target.with_name(f"{_UNFINISHED}{secrets.token_hex(8)}")
    try:
        unfinished.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
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
    remedy = "Check its owner and mode." if read_only else "Open it with read_only=True (?read_only=true) to read only."
    return StoreUnavailableError(f"{path} cannot be {what}", got=error.strerror or str(error), remedy=remedy)
