"""Stores by name: `"file:/path?capacity=8GiB&fsync=batch"`, `"memory:?capacity=1GiB"`, `"mooncake:host:50051"`, and
those of installed packages (entry points of the group `kvhoist.stores`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from os import PathLike
from pathlib import Path

from kvhoist.errors import ConfigError, KvhoistError, StorageError
from kvhoist.settings import Settings, user_path
from kvhoist.storage.base import Store
from kvhoist.storage.file import FileStore
from kvhoist.storage.io import StorageIO
from kvhoist.storage.memory import MemoryStore
from kvhoist.storage.mooncake import MooncakeOptions, MooncakeStore
from kvhoist.storage.record import Sealer

ENTRY_POINTS = "kvhoist.stores"
"""The group of entry points: name = scheme, object = a function from the whole address to an open Store."""

_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def open_store(target: str | Store) -> Store:
    """Open the store that `target` names; a store is returned as it is.

    `file:PATH` takes the options `capacity` (such as `8GiB`; default: the least of 32 GiB and half of what the disk
    could give), `fsync` (`never`, `batch` or `interval:SECONDS`), `direct` (`auto`, `on` or `off`: O_DIRECT) and
    `read_only` (`true` or `false`). `memory:` takes `capacity` (default
    1 GiB). PATH is taken literally up to the first `?`, but for a leading `~`; where it has a `?` of its own, open a
    FileStore. `mooncake:HOST:PORT` takes what `MooncakeOptions` lists. Other schemes are those of installed packages,
    which get the whole address. Raises ConfigError for an unknown scheme or option, StorageError for a package whose
    store cannot be loaded, and what opening the store raises.
    """
    if isinstance(target, PathLike | bytes):
        target = repr(target)  # which is no address either: the same error
    if not isinstance(target, str):
        return target
    scheme, colon, rest = target.partition(":")
    opener = _OPENERS.get(scheme) if colon else None
    if opener is None:
        return _open_installed(scheme if colon else "", target)
    place, _, query = rest.partition("?")
    return opener(place, _read_options(target, query))


def is_read_only(target: str) -> bool:
    """Tell whether the store at this address is to be opened without the right to write. Raises ConfigError."""
    _, _, query = target.partition("?")
    return _flag("read_only", _read_options(target, query).get("read_only", "false"))


def open_storage_io(
    store: Store, num_host_pages: int, *, num_threads: int, max_queued_pages: int | None, secret: bytes | None = None
) -> StorageIO:
    """Return the I/O pool between a host tier and `store`, owned by the caller. `max_queued_pages` None is half of the
    host tier, whose pages stay pinned while they wait, at least 64; `secret` None is the environment's, if any."""
    waiting = max_queued_pages or max(num_host_pages // 2, min(64, num_host_pages))
    sealer = Sealer(secret or Settings.from_env().store_secret)
    return StorageIO(store, sealer, num_threads=num_threads, max_queued_pages=waiting)


def _open_file(place: str, options: dict[str, str]) -> Store:
    _check_options("file", options, ("capacity", "fsync", "direct", "read_only"))
    return FileStore(
        folder_of(place),
        capacity=options.get("capacity"),
        fsync=options.get("fsync", "never"),
        direct=options.get("direct", "auto"),
        read_only=_flag("read_only", options.get("read_only", "false")),
    )


def folder_of(place: str) -> Path:
    """Return the folder of a file store by what stands behind `file:` and before `?`. Raises ConfigError."""
    if not place:
        raise ConfigError("a file store needs a folder", got="'file:'", expected="file:/path/to/folder")
    if place.startswith("//") and not place.startswith("///"):
        raise ConfigError(
            "a file store is on this machine",
            got=f"'file:{place}', which names the host {place[2:].partition('/')[0]!r}",
            expected="file:/path/to/folder, file:///path/to/folder or file:relative/folder",
        )
    return user_path(place.removeprefix("//"))


def _open_memory(place: str, options: dict[str, str]) -> Store:
    _check_options("memory", options, ("capacity",))
    if place:
        raise ConfigError("a memory store has no path", got=repr(place), expected="memory: or memory:?capacity=1GiB")
    return MemoryStore(options.get("capacity", "1GiB"))


def _open_mooncake(place: str, options: dict[str, str]) -> Store:
    return MooncakeStore(MooncakeOptions.from_address(place, options))


def _open_installed(scheme: str, target: str) -> Store:
    """Open a store of an installed package; the first found counts where several have the same name."""
    installed: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        installed.setdefault(point.name, point)
    if scheme not in installed:
        raise ConfigError(
            "an unknown kind of store",
            got=repr(target),
            choices=[f"{name}:" for name in dict.fromkeys([*_OPENERS, *sorted(installed)])],
            remedy="Write file:/path/to/folder for a store on disk.",
        )
    point = installed[scheme]
    try:
        store: Store = point.load()(target)
    except KvhoistError:
        raise
    except Exception as error:  # whatever a stranger's package raises
        raise StorageError(
            f"the installed store {scheme!r} cannot be opened",
            got=f"{type(error).__name__}: {error}, from {point.value}",
            remedy=f"Mend or remove the package {_package_of(point)}, or name another store.",
        ) from error
    lacking = [name for name in _METHODS if not callable(getattr(store, name, None))]
    if lacking:
        raise StorageError(
            f"the installed store {scheme!r} is none",
            got=f"{type(store).__name__} without {', '.join(lacking)}, from {point.value}",
            expected="what kvhoist.storage.Store lists",
            remedy=f"Mend or remove the package {_package_of(point)}; kvhoist.testing.store_suite tests a store.",
        )
    return store


def _package_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "that has it"


_OPENERS: Mapping[str, Callable[[str, dict[str, str]], Store]] = {
    "file": _open_file,
    "memory": _open_memory,
    "mooncake": _open_mooncake,
}
_METHODS = sorted(name for name, member in vars(Store).items() if callable(member) and not name.startswith("_"))


def _read_options(target: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if not equals or name in options:
            raise ConfigError(
                "an option of a store that cannot be read",
                got=f"{part!r} in {target!r}",
                expected="name=value, each name once, joined by &",
            )
        options[name] = value
    return options


def _check_options(scheme: str, options: dict[str, str], known: tuple[str, ...]) -> None:
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"an unknown option of a {scheme} store", got=", ".join(unknown), choices=known)


def _flag(name: str, value: str) -> bool:
    if value.lower() not in _FLAGS:
        raise ConfigError(f"{name} is not a yes or no", got=repr(value), choices=_FLAGS)
    return _FLAGS[value.lower()]
