from __future__ import annotations

from pathlib import Path

import pytest

from kvhoist.errors import ConfigError, StorageError
from kvhoist.storage import FileStore, MemoryStore, open_store


def test_a_file_store_by_name(tmp_path: Path) -> None:
    store = open_store(f"file:{tmp_path}/a?capacity=8MiB&fsync=batch&read_only=false")
    assert store.name == "file"
    assert store.stats().capacity_bytes == 8 << 20
    store.close()
    reader = open_store(f"file:{tmp_path}/a?read_only=true")
    assert isinstance(reader, FileStore)
    assert reader.read_only
    reader.close()


def test_paths_may_be_relative_or_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for text, folder in (
        ("file:rel/ative", tmp_path / "rel" / "ative"),
        (f"file://{tmp_path}/b", tmp_path / "b"),
        ("file:~/c", tmp_path / "home" / "c"),
        (f"file:{tmp_path}/100%25 & more", tmp_path / "100%25 & more"),
    ):
        store = open_store(text)
        assert isinstance(store, FileStore)
        assert store.folder == folder
        assert (folder / "kvhoist-store.json").exists()
        store.close()


def test_a_memory_store_by_name() -> None:
    assert open_store("memory:").stats().capacity_bytes == 1 << 30
    assert open_store("memory:?capacity=2MiB").stats().capacity_bytes == 2 << 20


def test_a_store_is_returned_as_it_is() -> None:
    store = MemoryStore()
    assert open_store(store) is store


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("/path/to/folder", "valid choices: file:, memory:, mooncake:"),
        ("s3:bucket", "valid choices: file:, memory:, mooncake:"),
        ("", "valid choices: file:, memory:, mooncake:"),
        ("file:", "needs a folder"),
        ("file:~nobody-here/x", "home of nobody known"),
        ("file://host/x", "names the host 'host'; expected file:/path/to/folder, file:///path"),
        ("file:/x?capacity=" + "9" * 400, "capacity is not a usable number of bytes"),
        ("file:/x?colour=red", "got colour; valid choices: capacity, fsync, direct, read_only"),
        ("file:/x?capacity", "name=value"),
        ("file:/x?fsync=batch&fsync=never", "each name once"),
        ("file:/x?fsync=sometimes", "valid choices: never, batch, interval:SECONDS"),
        ("file:/x?read_only=perhaps", "valid choices: 1, true, yes"),
        ("file:/x?capacity=-3", "capacity is not a usable number of bytes"),
        ("file:/x?capacity=999999999999GiB", "capacity is not a usable number of bytes"),
        ("memory:x", "has no path"),
        ("memory:?fsync=batch", "got fsync; valid choices: capacity"),
    ],
)
def test_what_cannot_be_opened_says_why_and_what_could(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(target)
    assert not Path("/x").exists()


def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(StorageError, match="not a kvhoist store"):
        open_store(f"file:{tmp_path}")


def test_a_path_is_no_address() -> None:
    with pytest.raises(ConfigError, match="Write file:/path/to/folder"):
        open_store(Path("/x"))  # type: ignore[arg-type]
