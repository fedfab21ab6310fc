"""A page that two other processes both wrote, since neither saw the other: it counts once, and a copy that is damaged
does not hide the other."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvhoist.storage import Sealer
from kvhoist.storage.admin import describe, list_namespaces, scrub
from kvhoist.storage.record import identity_of

NUM = 3
NEVER_S = 1e9


@pytest.fixture
def writers(stores: Any, pages: Any) -> list[Any]:
    """Two stores of one folder, as two processes have them, that both wrote pages 0 to NUM - 1."""
    pair = [stores.open(refresh_s=NEVER_S) for _ in range(2)]
    for writer in pair:
        assert all(pages.put(writer, range(NUM)))
        assert writer.stats().put_pages == NUM
    return pair


def place_of(store: Any, pages: Any, i: int) -> Any:
    return store._index.find(identity_of(pages.key(i)))


def spoil(store: Any, pages: Any, i: int) -> None:
    """Change a byte of the copy that `store` itself would read."""
    segment, slot = place_of(store, pages, i).shelf.segment, place_of(store, pages, i).slot
    fd = os.open(segment.path, os.O_WRONLY)
    os.pwrite(fd, b"damage", segment._blobs_at + slot * segment.pitch_bytes)
    os.close(fd)


def test_it_counts_once(stores: Any, pages: Any, writers: list[Any]) -> None:
    reader = stores.open()
    assert reader.num_segments() == (0, 2)
    assert reader.stats().num_pages == NUM
    assert len(list(reader.records())) == NUM
    assert [summary.num_pages for summary in list_namespaces(stores.folder)] == [NUM]
    assert describe(stores.folder)["num_pages"] == NUM
    assert pages.read(reader, range(NUM)) == ["good"] * NUM


@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_copy_does_not_hide_the_good_one(stores: Any, pages: Any, writers: list[Any], which: int) -> None:
    spoil(writers[which], pages, 1)
    reader = stores.open()
    first, _ = pages.fetch(reader)
    second, _ = pages.fetch(reader)
    assert first[0] == second[0] == second[1] == "good"
    assert first[1] == "good" or first[1].startswith("corrupt: blob damaged")
    assert reader.stats().quarantined_pages == (first[1] != "good")
    pages.put(writers[0], [50])
    assert pages.read(reader, [0, 1, 50]) == ["good"] * 3, "looking again does not bring the damaged copy back"


def test_with_both_damaged_it_is_missing_until_it_is_stored_anew(stores: Any, pages: Any, writers: list[Any]) -> None:
    for writer in writers:
        spoil(writer, pages, 1)
    reader = stores.open()
    outcomes = [pages.fetch(reader)[0][1] for _ in range(3)]
    assert [outcome[:21] for outcome in outcomes] == ["corrupt: blob damaged"] * 2 + ["missing"]
    assert reader.stats().quarantined_pages == 2
    assert pages.put(reader, [1]) == [True]
    assert pages.read(reader, range(NUM)) == ["good"] * NUM
    assert reader.stats().num_pages == NUM


def test_a_copy_that_goes_with_its_process_leaves_the_other(stores: Any, pages: Any, writers: list[Any]) -> None:
    reader = stores.open()
    assert pages.read(reader, range(NUM)) == ["good"] * NUM
    served = place_of(reader, pages, 0).shelf.segment.path
    owner = next(writer for writer in writers if place_of(writer, pages, 0).shelf.segment.path == served)
    owner.remove_namespace(pages.namespace)
    reader.exists([pages.key(99)])
    assert reader.num_segments() == (0, 1)
    assert pages.read(reader, range(NUM)) == ["good"] * NUM
    assert reader.stats().num_pages == NUM


def test_ones_own_damaged_copy_does_not_hide_anothers(stores: Any, pages: Any, writers: list[Any]) -> None:
    mine, _ = writers
    mine._neighbours._refresh_s = 0.0
    mine._neighbours._next_refresh = 0.0
    assert mine.exists([pages.key(99)]) == [False]
    assert mine.num_segments() == (1, 1)
    assert mine.stats().num_pages == NUM
    spoil(mine, pages, 1)
    assert pages.fetch(mine)[0][1].startswith("corrupt: blob damaged")
    assert pages.fetch(mine)[0][:NUM] == ["good"] * NUM
    assert mine.stats().num_pages == NUM
    mine.audit()


def test_scrub_tells_of_the_damaged_copy_and_looks_at_the_one_behind_it(
    stores: Any, pages: Any, writers: list[Any]
) -> None:
    for writer in writers:
        spoil(writer, pages, 1)
    for read_only in (True, False):
        report = scrub(stores.folder, Sealer(), read_only=read_only)
        assert report.num_pages == NUM
        assert [key for key, _ in report.bad] == [pages.key(1)] * 2
