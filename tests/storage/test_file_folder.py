"""What a FileStore refuses, in words, before anything is changed; and disks that are full or read-only."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhoist.errors import StorageError, StoreFormatError, StoreUnavailableError
from kvhoist.storage import FileStore
from kvhoist.storage.file.capacity import default_capacity_bytes, segment_bytes_for
from kvhoist.storage.file.folder import FORMAT_FILE


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "kvhoist", folder]).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_another_format_version_is_refused_and_left_alone(stores: Any, pages: Any) -> None:
    store = stores.open()
    pages.put(store, range(3))
    store.close()
    path = stores.folder / "kvhoist-store.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"version": 2}))
    before = tree(stores.folder)
    with pytest.raises(
        StoreFormatError, match=r"got kvhoist-store version 2; expected kvhoist-store version 1.*Nothing"
    ):
        stores.open()
    with pytest.raises(StoreFormatError):
        stores.open(read_only=True)
    assert tree(stores.folder) == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"format": "kvhoist-store", "version": 1}',
        '{"format": "kvhoist-store", "version": 1, "store_id": "zz"}',
    ],
)
def test_a_damaged_format_file_is_refused_and_left_alone(stores: Any, text: str) -> None:
    stores.open().close()
    (stores.folder / "kvhoist-store.json").write_text(text)
    before = tree(stores.folder)
    with pytest.raises(StoreFormatError, match="cannot be read as the description of a store"):
        stores.open()
    assert tree(stores.folder) == before


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(StorageError, match="not a folder"):
        FileStore(path)
    with pytest.raises(StorageError):
        FileStore(path / "below")
    assert path.read_text() == "mine"


def test_a_folder_with_other_things_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"not a kvhoist store.*thesis\.txt.*Nothing was changed"):
        FileStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_empty_folder_and_a_new_one_below_new_ones_become_stores(tmp_path: Path, pages: Any) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "lost+found").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        with FileStore(folder, capacity="1MiB") as store:
            assert all(pages.put(store, range(3)))


def test_a_folder_whose_making_was_interrupted_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / ".kvhoist-0123").write_text("{")
    FileStore(tmp_path, capacity="1MiB").close()


def test_reading_only_wants_a_store_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no store"):
        FileStore(tmp_path / "nothing", read_only=True)
    with pytest.raises(StorageError, match="not a kvhoist store"):
        FileStore(tmp_path, read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_store_opened_to_read_refuses_to_write_and_changes_nothing(stores: Any, pages: Any) -> None:
    store = stores.open()
    store.note_namespace(pages.namespace, {"model": "x"})
    pages.put(store, range(5))
    store.close()
    before = tree(stores.folder)
    reader = stores.open(read_only=True)
    assert pages.read(reader, range(6)) == ["good"] * 5 + ["missing"]
    assert reader.namespaces() == {pages.namespace: {"model": "x"}}
    for act in (
        lambda: pages.put(reader, [7]),
        lambda: reader.remove(pages.keys([1])),
        lambda: reader.remove_namespace(pages.namespace),
    ):
        with pytest.raises(StoreUnavailableError, match=r"read-only.*Open it without"):
            act()
    reader.note_namespace(b"n" * 32, {})
    reader.quarantine(pages.keys([1]))
    assert reader.exists(pages.keys([1, 2])) == [False, True]
    assert tree(stores.folder) == before
    owner = stores.open()
    assert owner.num_segments() == (1, 0), "a reader holds no lock"


def test_a_file_system_that_is_read_only_says_so_and_opens_to_read(mounted: Path, pages: Any) -> None:
    with FileStore(mounted / "store", capacity="1MiB") as store:
        pages.put(store, range(5))
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    with pytest.raises(StoreUnavailableError, match=r"cannot be written.*[Rr]ead-only.*read_only=True"):
        FileStore(mounted / "store", capacity="1MiB")
    with pytest.raises(StoreUnavailableError):
        FileStore(mounted / "new", capacity="1MiB")
    with FileStore(mounted / "store", read_only=True) as reader:
        assert pages.read(reader, range(5)) == ["good"] * 5


def test_a_full_disk_drops_what_does_not_fit_and_the_store_goes_on(mounted: Path, pages: Any) -> None:
    with FileStore(mounted / "store", capacity="1GiB") as store:
        kept = [pages.put(store, range(first, first + 50)) for first in range(0, 1000, 50)]
        assert all(kept[0])
        held = store.exists(pages.keys(range(1000)))
        assert 100 < sum(held) < 512
        assert set(pages.read(store, [i for i in range(1000) if held[i]])) == {"good"}
        assert all(kept[-1]), "a full disk evicts, as full capacity does"
        store.audit()
    with FileStore(mounted / "store", capacity="1GiB") as again:
        assert again.exists(pages.keys(range(1000))) == held


def test_a_disk_too_full_for_one_page_answers_no(mounted: Path, pages: Any) -> None:
    with FileStore(mounted / "store", capacity="1MiB") as store:
        (mounted / "ballast").write_bytes(bytes(4 << 20)[: os.statvfs(mounted).f_bavail * 4096])
        assert pages.put(store, range(5)) == [False] * 5
        assert store.stats().dropped_pages == 5
        assert list((mounted / "store" / "segments").iterdir()) == [], "nothing half-made is left"
        (mounted / "ballast").unlink()
        store._writer._full_until = 0.0
        assert pages.put(store, range(5)) == [True] * 5


def test_a_limit_on_file_sizes_drops_pages_and_raises_nothing(tmp_path: Path) -> None:
    script = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from kvhoist.messages import WHOLE, PageKey, StorageKey
from kvhoist.storage import FileStore, Sealer
store = FileStore(sys.argv[1], capacity="64MiB")
keys = [StorageKey(PageKey(bytes(32), 0, bytes([i]) * 32), WHOLE) for i in range(40)]
blob = memoryview(bytes(6000))
kept = store.put(keys, [Sealer().seal(key, blob) for key in keys], [blob] * 40)
assert 0 < sum(kept) < 40, kept
assert store.stats().dropped_pages == 40 - sum(kept), store.stats()
store.audit()
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "store")], check=True, timeout=60)


def test_a_folder_that_vanishes_is_misses_and_no_crash(stores: Any, pages: Any) -> None:
    store = stores.open(capacity="1MiB")
    (stores.folder / "segments").rename(stores.folder / "gone")
    assert pages.put(store, range(3)) == [False] * 3
    assert pages.read(store, range(3)) == ["missing"] * 3


def test_a_damaged_namespace_note_is_skipped(stores: Any) -> None:
    store = stores.open()
    store.note_namespace(b"a" * 32, {"model": "x"})
    for name in ("zz.json", "00.json"):
        (stores.folder / "namespaces" / name).write_text("{")
    assert store.namespaces() == {b"a" * 32: {"model": "x"}}


def test_default_capacity_counts_what_the_store_holds_already(stores: Any, pages: Any) -> None:
    store = stores.open(capacity=None)
    assert 0 < store.stats().capacity_bytes <= 32 << 30
    free = os.statvfs(stores.folder)
    assert store.stats().capacity_bytes <= max(1, free.f_bavail * free.f_frsize // 2 + (1 << 30))
    before = default_capacity_bytes(stores.folder)
    pages.put(store, range(3))
    held = sum(path.stat().st_size for path in stores.segments())
    assert default_capacity_bytes(stores.folder) > before - held // 2 or before == 32 << 30


@pytest.mark.parametrize("capacity", [1, 1 << 20, 1 << 30, 8 << 30, 32 << 30, 1 << 42])
def test_the_number_of_segments_is_bounded(capacity: int) -> None:
    assert segment_bytes_for(capacity) <= max(1, capacity // 8)
    assert capacity // max(1, segment_bytes_for(capacity)) <= 64


DEEP = '{"fields":' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize(
    "content", [DEEP, '{"fields": {}}', '{"fields": {"a": "' + "x" * (1 << 20) + '"}}', "[]", "\0"]
)
def test_a_note_that_is_no_note_is_skipped(stores: Any, pages: Any, content: str) -> None:
    store = stores.open()
    store.note_namespace(pages.namespace, {"model_id": "m"})
    (stores.folder / "namespaces" / ("ab" * 32 + ".json")).write_text(content)
    (stores.folder / "namespaces" / "abcd.json").write_text('{"fields": {"a": "b"}}')
    os.mkfifo(stores.folder / "namespaces" / ("cd" * 32 + ".json"))
    (stores.folder / "namespaces" / ("ef" * 32 + ".json")).mkdir()
    assert store.namespaces() == {pages.namespace: {"model_id": "m"}}


def test_a_description_that_nests_too_deep_is_refused(stores: Any) -> None:
    stores.open().close()
    (stores.folder / FORMAT_FILE).write_text(DEEP)
    with pytest.raises(StoreFormatError, match="Nothing was changed"):
        stores.open()


def test_a_full_disk_leaves_nothing_behind_and_says_so(stores: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreUnavailableError, match="Free some space"):
        stores.open()
    assert list(stores.folder.iterdir()) == []


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_what_cannot_be_a_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError, match="cannot be the path of a folder"):
        FileStore(tmp_path / name)
