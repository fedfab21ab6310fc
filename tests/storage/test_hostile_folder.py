"""A store folder in which a stranger put things: nothing outside of it is touched, nothing hangs, pages are served."""

from __future__ import annotations

import logging
import os
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvhoist.errors import KvhoistError, StorageError
from kvhoist.storage import FileStore, Sealer, open_store
from kvhoist.storage.admin import describe, list_namespaces, remove, scrub
from kvhoist.storage.file.segment import MAX_SLOTS, file_bytes_of

NUM = 3
MOST_BYTES = 16 << 20
MOST_S = 20.0


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, set[int]]:
    found = [folder, *folder.rglob("*")]
    return {
        kind: {path.stat().st_mode & 0o777 for path in found if path.is_dir() == (kind == "folder")}
        for kind in ("folder", "file")
    }


@pytest.mark.usefixtures("open_umask")
def test_all_that_is_made_is_its_users_alone_whatever_the_umask(
    tmp_path: Path, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: set[int] = set()
    real_open = os.open

    def watched(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        fd: int = real_open(path, flags, mode, **options)
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            made.add(os.fstat(fd).st_mode & 0o777)
        return fd

    monkeypatch.setattr(os, "open", watched)
    with FileStore(tmp_path / "above" / "store", capacity="8MiB") as store:
        pages.put(store, range(NUM))
        store.note_namespace(pages.namespace, {"model_id": '"m"'})
    assert made == {0o600}, "unfinished files too"
    assert modes(tmp_path / "above") == {"folder": {0o700}, "file": {0o600}}


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize(("mode", "folders", "files"), [(0o770, 0o770, 0o660), (0o755, 0o700, 0o600)])
def test_what_is_made_is_the_groups_too_where_the_group_can_write_to_the_folder(
    tmp_path: Path, pages: Any, mode: int, folders: int, files: int
) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    folder.chmod(mode)
    with FileStore(folder, capacity="8MiB") as store:
        pages.put(store, range(NUM))
        store.note_namespace(pages.namespace, {"model_id": '"m"'})
    assert modes(folder) == {"folder": {mode, folders}, "file": {files}}


def test_a_folder_that_everybody_may_write_to_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with caplog.at_level(logging.WARNING):
        FileStore(tmp_path / "open", capacity="1MiB").close()
        FileStore(tmp_path / "own", capacity="1MiB").close()
    assert [record.message.count("every user") for record in caplog.records] == [1]


def plant_nothing(path: Path, outside: Path) -> None:
    path.touch()


def plant_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "file")


def plant_segment_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / path.name)


def plant_folder_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def plant_device_link(path: Path, outside: Path) -> None:
    path.symlink_to("/dev/zero")


def plant_loop(path: Path, outside: Path) -> None:
    path.symlink_to(path)


def plant_pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def plant_folder(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "file").write_text("mine")


def plant_hard_link(path: Path, outside: Path) -> None:
    path.hardlink_to(outside / "file")


PLANTS = [
    plant_nothing,
    plant_link,
    plant_segment_link,
    plant_folder_link,
    plant_device_link,
    plant_loop,
    plant_pipe,
    plant_folder,
    plant_hard_link,
]
NAMES = {
    "segments": ["ab" * 16 + ".seg", "cd" * 16 + ".tmp", "\x1b[31m\n.seg", "..seg", "x" * 250 + ".seg", "thesis.tmp"],
    "namespaces": ["ab" * 32 + ".json", "\x1b]0;x\x07\n.json", "...json", "x" * 250 + ".json", b"\xff.json"],
}


@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_not_ours_is_left_alone_and_harms_nothing(
    stores: Any, pages: Any, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    owner = stores.open()
    pages.put(owner, range(NUM))
    owner.note_namespace(pages.namespace, {"model_id": '"m"'})
    owner.close()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(bytes(100))
    # As good a segment as can be, but outside.
    (outside / NAMES["segments"][0]).write_bytes(forged(stores, 8192, 8, 12288 + 8 * 8192, NAMES["segments"][0]))
    before = {path.name: path.read_bytes() for path in outside.iterdir()}
    for folder, names in NAMES.items():
        for name in names:
            plant(stores.folder / folder / os.fsdecode(name), outside)
    for read_only in (True, False):
        with FileStore(stores.folder, capacity="8MiB", read_only=read_only) as store:
            assert pages.read(store, range(NUM)) == ["good"] * NUM
            assert store.namespaces() == {pages.namespace: {"model_id": '"m"'}}
            if not read_only:
                assert all(pages.put(store, range(NUM + 20)))
            assert all(name.isprintable() for name in store.faults())
    assert list_namespaces(stores.folder)[0].num_pages == NUM + 20
    assert describe(stores.folder)["num_pages"] == NUM + 20
    assert not scrub(stores.folder, Sealer()).bad
    assert remove(stores.folder).removed_pages == NUM + 20
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == before
    for name in NAMES["segments"][2:]:
        assert os.path.lexists(stores.folder / "segments" / name), "no segment's name: not kvhoist's to delete"


def forged(stores: Any, pitch_bytes: int, num_slots: int, file_bytes: int, name: str) -> bytes:
    """A segment file of this store, with sound checks, of which only `file_bytes` are there; empty."""
    original = next(iter(stores.segments())).read_bytes()[:4096]
    blobs_at = file_bytes_of(pitch_bytes, num_slots) - num_slots * pitch_bytes
    shape = struct.pack("<QQQQ", pitch_bytes, num_slots, 8192, blobs_at)
    block = original[:16] + bytes.fromhex(name[:32]) + original[32:48] + shape + original[80:4088]
    block += xxhash.xxh3_64_intdigest(block).to_bytes(8, "little")
    return block + bytes(file_bytes - len(block))


@pytest.mark.parametrize("file_bytes", [4096, 8192, 100_000])
@pytest.mark.parametrize("pitch_bytes", [4096, 1 << 30, 1 << 32])
def test_a_few_bytes_that_speak_of_millions_of_slots_cost_neither_memory_nor_time(
    stores: Any, pages: Any, pitch_bytes: int, file_bytes: int
) -> None:
    stores.open().close()
    pages.put(store := stores.open(), range(NUM))
    store.close()
    for number in range(8):
        name = f"{number:032x}.seg"
        (stores.folder / "segments" / name).write_bytes(forged(stores, pitch_bytes, MAX_SLOTS, file_bytes, name))
    tracemalloc.start()
    began = time.monotonic()
    for read_only in (True, False):
        with FileStore(stores.folder, capacity="1GiB", read_only=read_only) as store:
            assert pages.read(store, range(NUM)) == ["good"] * NUM
    assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    tracemalloc.stop()
    assert time.monotonic() - began < MOST_S
    assert len(stores.segments()) == 1, "they hold nothing, and are deleted by who may write"


@pytest.mark.parametrize("place", ["kvhoist-store.json", "segments", "namespaces"])
@pytest.mark.parametrize("plant", PLANTS)
def test_parts_of_the_folder_that_are_something_else_are_an_error_and_no_more(
    stores: Any, tmp_path: Path, place: str, plant: Callable[[Path, Path], None]
) -> None:
    stores.open().close()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    path = stores.folder / place
    path.rmdir() if path.is_dir() else path.unlink()
    plant(path, outside)
    for read_only in (True, False):
        try:
            FileStore(stores.folder, capacity="8MiB", read_only=read_only).close()
        except StorageError as error:
            assert str(stores.folder) in str(error)  # noqa: PT017 - a folder in its place is fine
    assert (outside / "file").read_text() == "mine"
    assert not (outside / "kvhoist-store.json").exists()


@pytest.mark.parametrize("name", ["a/../b", "%2e%2e", "..%2fx", "$HOME", "${HOME}x", "a\nb", "\x1b[31m", " x ", "ü"])
def test_the_path_of_an_address_is_taken_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    open_store(f"file:{name}?capacity=1MiB").close()
    assert (tmp_path / name / "kvhoist-store.json").is_file()
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("target", ["file:a\0b", "file:x?capacity=1MiB\0", "file:" + "x" * 300, "file:" + "x/" * 3000])
def test_an_address_that_no_folder_can_have_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KvhoistError):
        open_store(target)
    assert list(tmp_path.iterdir()) == []
