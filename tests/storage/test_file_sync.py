"""When a store syncs, by policy; and what a sync that fails costs."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvhoist.errors import ConfigError
from kvhoist.storage import FileStore
from kvhoist.storage.file.segment import Segment
from kvhoist.storage.file.sync import interval_of


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The segments that were synced, in order."""
    paths: list[Path] = []
    sync = Segment.sync

    def note(segment: Segment) -> None:
        sync(segment)
        paths.append(segment.path)

    monkeypatch.setattr(Segment, "sync", note)
    return paths


def test_never_syncs_no_page(stores: Any, pages: Any, synced: list[Path]) -> None:
    store = stores.open(fsync="never")
    pages.put(store, range(5))
    store.close()
    stores.open(fsync="never").close()
    assert synced == []


def test_batch_syncs_once_before_it_confirms(stores: Any, pages: Any, synced: list[Path]) -> None:
    store = stores.open(fsync="batch")
    assert all(pages.put(store, range(5)))
    assert synced == stores.segments()
    assert all(pages.put(store, range(5)))
    assert len(synced) == 1, "nothing was written"


def test_an_interval_syncs_when_its_time_is_over(
    stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch, synced: list[Path]
) -> None:
    done = threading.Event()
    sync = Segment.sync
    monkeypatch.setattr(Segment, "sync", lambda segment: (sync(segment), done.set()))
    store = stores.open(fsync="interval:0.01")
    pages.put(store, range(5))
    assert done.wait(20)
    done.clear()
    pages.put(store, range(5, 10))
    assert done.wait(20), "and again after new pages"


def test_an_interval_that_is_not_over_ends_with_the_store(stores: Any, pages: Any, synced: list[Path]) -> None:
    store = stores.open(fsync="interval:3600")
    num_threads = threading.active_count()
    pages.put(store, range(5))
    pages.put(store, range(5, 10))
    assert synced == []
    assert threading.active_count() == num_threads + 1
    store.close()
    assert synced == stores.segments()


def test_what_a_former_process_left_is_synced_before_it_counts_as_held(
    stores: Any, pages: Any, synced: list[Path]
) -> None:
    store = stores.open(fsync="never")
    pages.put(store, range(5))
    store.close()
    again = stores.open(fsync="batch")
    assert synced == stores.segments()
    assert all(pages.put(again, range(5)))


def test_a_page_whose_sync_failed_is_not_confirmed(stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stores.open(fsync="batch")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", _fail)
        assert pages.put(store, range(5)) == [False] * 5
    assert store.stats().error_pages == 5
    assert pages.read(store, range(5)) == ["missing"] * 5
    assert all(pages.put(store, range(5)))
    assert pages.read(store, range(5)) == ["good"] * 5


def test_a_late_sync_that_fails_is_counted_and_logged(
    stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = stores.open(fsync="interval:3600")
    pages.put(store, range(5))
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", _fail)
        store._syncer.flush()
    assert store.stats().error_pages == 1
    assert "may not survive a power cut" in caplog.text
    assert pages.read(store, range(5)) == ["good"] * 5


def test_a_segment_given_up_before_its_sync_is_closed(stores: Any, pages: Any) -> None:
    store = stores.open(fsync="interval:3600")
    pages.put(store, range(5))
    (place,) = {place.shelf for _, place in store._index.owned_pages()}
    store.remove_namespace(pages.namespace)
    assert not place.closed
    store._syncer.flush()
    assert place.closed


def test_a_generation_that_cannot_be_written_costs_no_page(
    stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = stores.open()
    pwritev = os.pwritev

    def fail_at_the_generation(fd: int, buffers: Any, offset: int) -> int:
        return _fail() if offset == 4096 else pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", fail_at_the_generation)
    assert all(pages.put(store, range(5)))
    assert "other processes cannot see new pages yet" in caplog.text
    assert pages.read(store, range(5)) == ["good"] * 5


def test_a_new_store_is_durable_name_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: Any) -> None:
    """Each folder is synced after the last name that the store needs was put into it."""
    synced: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        fsync(fd)
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", note)
    with FileStore(tmp_path / "a" / "b", capacity="8MiB") as store:
        assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(synced)
        pages.put(store, [1])
        assert synced[-1] == str(tmp_path / "a" / "b" / "segments")
        assert synced[-2].endswith(".tmp")


def test_a_torn_note_of_a_namespace_is_written_anew(stores: Any, pages: Any) -> None:
    store = stores.open()
    store.note_namespace(pages.namespace, {"model": "m"})
    (path,) = (stores.folder / "namespaces").iterdir()
    path.write_bytes(b"")
    assert store.namespaces() == {}
    store.note_namespace(pages.namespace, {"model": "m"})
    assert store.namespaces() == {pages.namespace: {"model": "m"}}


@pytest.mark.parametrize(
    "text",
    ["", "data", "interval", "interval:", "interval:0", "interval:-1", "interval:nan", "interval:1e9", "batch:1"],
)
def test_an_unknown_policy_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"valid choices: never, batch, interval:SECONDS"):
        interval_of(text)


def _fail(*_: object) -> None:
    raise OSError(errno.EIO, "the disk is gone")
