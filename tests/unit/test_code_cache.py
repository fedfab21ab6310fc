"""Compiled kernels on disk: found again by content only, and never taken from anybody else."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhoist.copy import code_cache
from kvhoist.copy.code_cache import CodeCache, code_key

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
IMAGE = b"\x7fELF" + bytes(range(256)) * 20


@pytest.fixture
def cache(tmp_path: Path) -> CodeCache:
    return CodeCache(tmp_path / "kernels")


def entry_of(cache: CodeCache) -> Path:
    cache.store(KEY, IMAGE)
    (entry,) = cache.folder.iterdir()
    return entry


def opened_in(folder: Path) -> list[str]:
    """Return what this process holds open below `folder`."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # another thread's, closed meanwhile
            found.append(os.readlink(descriptor))
    return [name for name in found if name.startswith(str(folder))]


def test_what_was_stored_is_loaded_by_every_cache_on_the_folder(cache: CodeCache) -> None:
    assert cache.load(KEY) is None
    cache.store(KEY, IMAGE)
    assert cache.load(KEY) == CodeCache(cache.folder).load(KEY) == IMAGE
    assert cache.load(OTHER_KEY) is None


def test_folder_and_entry_are_their_users_alone_whatever_the_umask(cache: CodeCache) -> None:
    before = os.umask(0)
    try:
        entry = entry_of(cache)
    finally:
        os.umask(before)
    assert entry.stat().st_mode & 0o777 == 0o600
    assert cache.folder.stat().st_mode & 0o777 == 0o700


def test_the_folder_is_the_settings_own_by_default_and_made_late(cache_dir: Path) -> None:
    cache = CodeCache(None)
    assert cache.folder == cache_dir / "kernels"
    assert not cache_dir.exists()
    cache.store(KEY, IMAGE)
    assert cache.load(KEY) == IMAGE


@given(data=st.data())
def test_no_byte_of_an_entry_can_change_unseen(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache = CodeCache(Path(folder))
        entry = entry_of(cache)
        whole = entry.read_bytes()
        position = data.draw(st.integers(0, len(whole) - 1))
        damaged = bytearray(whole)
        damaged[position] ^= data.draw(st.integers(1, 255))
        for content in (bytes(damaged), whole[:position], whole + b"\0"):
            entry.write_bytes(content)
            assert cache.load(KEY) is None
        cache.store(KEY, IMAGE)
        assert cache.load(KEY) == IMAGE


def test_an_entry_under_another_name_is_not_loaded(cache: CodeCache) -> None:
    entry = entry_of(cache)
    entry.rename(entry.with_name(f"{OTHER_KEY.hex()}.bin"))
    assert cache.load(OTHER_KEY) is None


def test_another_format_version_neither_shares_keys_nor_reads_entries(
    cache: CodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key() -> bytes:
        return code_key(source="s", name="n", options=(), compiler="c")

    cache.store(KEY, IMAGE)
    old = key()
    monkeypatch.setattr(code_cache, "FORMAT_VERSION", code_cache.FORMAT_VERSION + 1)
    assert key() != old
    assert cache.load(KEY) is None


def test_an_entry_of_another_user_is_not_used(
    cache: CodeCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.store(KEY, IMAGE)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert cache.load(KEY) is None
    assert f"owned by user {user}, not {user + 1}. It is compiled anew and replaced" in caplog.text


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_an_entry_that_others_may_write_is_not_used_but_replaced(
    cache: CodeCache, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    entry = entry_of(cache)
    entry.chmod(mode)
    assert cache.load(KEY) is None
    assert f"others may write it (mode {mode:04o})" in caplog.text
    cache.store(KEY, IMAGE)
    assert cache.load(KEY) == IMAGE


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_an_entry_that_is_no_file_of_its_own_is_not_used(cache: CodeCache, kind: str, tmp_path: Path) -> None:
    entry = entry_of(cache)
    elsewhere = entry.rename(tmp_path / "elsewhere")
    if kind == "link":
        entry.symlink_to(elsewhere)
    elif kind == "pipe":
        os.mkfifo(entry)
    else:
        entry.mkdir()
    assert cache.load(KEY) is None
    cache.store(KEY, IMAGE[::-1])
    assert cache.load(KEY) == (None if kind == "folder" else IMAGE[::-1])
    assert elsewhere.read_bytes().endswith(IMAGE), "a link was followed"
    assert opened_in(tmp_path) == []
    assert [path.name for path in cache.folder.iterdir()] == [entry.name]


def test_a_folder_that_cannot_be_used_is_told_once_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "kernels", Path("/proc/nothing"), Path("a\0b")):
        caplog.clear()
        cache = CodeCache(folder)
        for _ in range(3):
            cache.store(KEY, IMAGE)
            assert cache.load(KEY) is None
        assert len(caplog.records) == 1
        assert "processes compile their own" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@contextmanager
def folder_of_a_common_user() -> Iterator[Path]:
    """A folder whose user this process is; not root, who may write anything."""
    user, nobody = os.geteuid(), 65534
    with tempfile.TemporaryDirectory() as name:
        try:
            if user == 0:
                os.chown(name, nobody, -1)
                os.seteuid(nobody)
            yield Path(name)
            os.chmod(name, 0o700)
        finally:
            os.seteuid(user)


def test_a_read_only_folder_still_serves_what_it_has() -> None:
    with folder_of_a_common_user() as folder:
        cache = CodeCache(folder)
        cache.store(KEY, IMAGE)
        folder.chmod(0o500)
        cache.store(OTHER_KEY, IMAGE)
        assert cache.load(KEY) == IMAGE
        assert cache.load(OTHER_KEY) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_in_a_shared_folder_no_user_loads_what_another_stored() -> None:
    with folder_of_a_common_user() as folder:
        cache = CodeCache(folder)
        cache.store(KEY, IMAGE)
        assert cache.load(KEY) == IMAGE
        os.seteuid(0)
        assert cache.load(KEY) is None
        cache.store(KEY, IMAGE[::-1])
        assert cache.load(KEY) == IMAGE[::-1]
        (entry,) = folder.iterdir()
        assert entry.stat().st_uid == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["mkstemp", "replace"])
def test_a_failed_store_leaves_what_was_there(
    cache: CodeCache, code: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entry_of(cache)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile if call == "mkstemp" else os, call, fail)
    cache.store(KEY, b"new")
    assert cache.load(KEY) == IMAGE
    assert list(cache.folder.iterdir()) == [entry]


WRITER = """
import sys
from pathlib import Path
from kvhoist.copy.code_cache import CodeCache

cache, image = CodeCache(Path(sys.argv[1])), sys.argv[2].encode() * 50_000
for _ in range(60):
    cache.store(bytes(32), image)
    found = cache.load(bytes(32))
    assert found is not None and len(found) == 50_000 and len(set(found)) == 1
"""


def test_processes_that_publish_the_same_key_never_show_half_an_entry(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(folder), letter]) for letter in "ab"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    assert [path.name for path in folder.iterdir()] == [f"{bytes(32).hex()}.bin"]


PARTS = st.fixed_dictionaries(
    {
        "source": st.text("ab\0"),
        "name": st.text("ab\0"),
        "options": st.lists(st.text("ab\0"), max_size=3),
        "compiler": st.text("ab\0"),
    }
)


@given(first=PARTS, second=PARTS)
def test_keys_are_equal_where_all_parts_are(first: dict[str, object], second: dict[str, object]) -> None:
    assert (code_key(**first) == code_key(**second)) == (first == second)  # type: ignore[arg-type]


def test_parts_do_not_run_into_each_other() -> None:
    def key(options: list[str], source: str = "") -> bytes:
        return code_key(source=source, name="", options=options, compiler="")

    assert len({key(["ab", "c"]), key(["a", "bc"]), key(["abc"]), key(["ab"], "c"), key([], "abc")}) == 5
