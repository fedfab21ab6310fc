from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvhoist.errors import ConfigError, StorageError
from kvhoist.storage import Sealer
from kvhoist.storage.admin import describe, list_namespaces, remove, scrub
from kvhoist.storage.record import identity_of


@pytest.fixture
def filled(stores: Any, pages_of: Any) -> tuple[Any, Any]:
    """A closed folder with 20 pages of 6000 bytes of one namespace and 5 of 100 bytes of another."""
    first, second = pages_of(), pages_of(namespace=b"\xab" * 32, page_bytes=100)
    store = stores.open()
    first.put(store, range(20))
    second.put(store, range(5))
    store.note_namespace(first.namespace, {"model": "x"})
    store.note_namespace(b"\xcd" * 32, {"model": "empty"})
    store.close()
    return first, second


def test_ls_counts_pages_and_bytes_by_namespace(stores: Any, filled: Any) -> None:
    first, second = filled
    summaries = list_namespaces(stores.folder)
    assert [(s.namespace, s.fields, s.num_pages, s.num_bytes) for s in summaries] == [
        (first.namespace, {"model": "x"}, 20, 120_000),
        (second.namespace, {}, 5, 500),
        (b"\xcd" * 32, {"model": "empty"}, 0, 0),
    ]
    assert 0 <= summaries[0].youngest_s <= summaries[0].oldest_s < 60
    assert summaries[1].to_dict()["namespace"] == "ab" * 32


def test_stat_describes_the_folder(stores: Any, filled: Any) -> None:
    about = describe(stores.folder)
    assert (about["num_pages"], about["page_bytes"], about["num_namespaces"]) == (25, 120_500, 3)
    assert about["num_segments"] == len(stores.segments())
    assert about["file_bytes"] == sum(path.stat().st_size for path in stores.segments())
    assert about["faults"] == {}


def test_ls_and_stat_see_a_store_that_is_in_use(stores: Any, pages: Any) -> None:
    store = stores.open()
    pages.put(store, range(3))
    assert list_namespaces(stores.folder)[0].num_pages == 3
    assert describe(stores.folder)["num_pages"] == 3


def test_scrub_reads_every_page_and_takes_bad_ones_out(stores: Any, filled: Any) -> None:
    first, _ = filled
    assert scrub(stores.folder, Sealer()).clean
    store = stores.open()
    places = {i: store._index.find(key) for i, key in enumerate(map(identity_of, first.keys(range(20))))}
    segment, at = places[4].shelf.segment, places[4].shelf.segment._blobs_at + places[4].slot * 8192
    os.pwrite(segment.fd, b"damage", at)
    store.close()
    seen: list[tuple[int, int]] = []
    looked = scrub(stores.folder, Sealer(), read_only=True)
    assert [key for key, _ in looked.bad] == [first.key(4)]
    assert not looked.repaired
    report = scrub(stores.folder, Sealer(), progress=lambda done, total: seen.append((done, total)))
    assert (report.num_pages, report.num_bytes) == (25, 120_500)
    assert [(key, reason[:12]) for key, reason in report.bad] == [(first.key(4), "blob damaged")]
    assert not report.clean
    assert report.to_dict()["bad"][0]["reason"].startswith("blob damaged")
    assert seen[-1] == (25, 25)
    assert scrub(stores.folder, Sealer()).num_pages == 24
    assert scrub(stores.folder, Sealer()).clean


def test_scrub_reports_damaged_headers(stores: Any, filled: Any) -> None:
    path = stores.segments()[0]
    content = bytearray(path.read_bytes())
    content[8192 + 100] ^= 1
    path.write_bytes(content)
    assert scrub(stores.folder, Sealer(), read_only=True).damaged_headers == 1
    assert scrub(stores.folder, Sealer()).damaged_headers == 1
    assert scrub(stores.folder, Sealer()).clean


def test_rm_removes_a_namespace_by_prefix_and_gives_the_disk_back(stores: Any, filled: Any) -> None:
    first, second = filled
    report = remove(stores.folder, "ab")
    assert (report.namespaces, report.removed_pages, report.left_pages) == ((second.namespace,), 5, 0)
    assert [summary.num_pages for summary in list_namespaces(stores.folder)] == [20, 0]
    assert len(stores.segments()) == 1
    assert first.read(stores.open(), range(20)) == ["good"] * 20


def test_rm_removes_everything(stores: Any, filled: Any) -> None:
    assert remove(stores.folder).removed_pages == 25
    assert list_namespaces(stores.folder) == []
    assert stores.segments() == []


def test_rm_of_an_unknown_prefix_names_the_namespaces(stores: Any, filled: Any) -> None:
    with pytest.raises(ConfigError, match="valid choices: 0001020304050607, abababababababab, cdcdcdcdcdcdcdcd"):
        remove(stores.folder, "ee")


def test_rm_leaves_the_pages_of_a_running_process(stores: Any, pages: Any) -> None:
    store = stores.open()
    store.note_namespace(pages.namespace, {"model": "x"})
    pages.put(store, range(3))
    report = remove(stores.folder)
    assert (report.removed_pages, report.left_pages) == (0, 3)
    assert pages.read(store, range(3)) == ["good"] * 3
    assert store.namespaces() == {pages.namespace: {"model": "x"}}


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    for act in (list_namespaces, describe, remove, lambda folder: scrub(folder, Sealer())):
        with pytest.raises(StorageError):
            act(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []
