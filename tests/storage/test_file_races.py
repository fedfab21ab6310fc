"""What happens to a FileStore in the middle of a read or a write: eviction, replacement, other threads, disk errors."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvhoist.storage import FileStore, Sealer
from kvhoist.storage.file.segment import Segment, file_bytes_of, pitch_of

DEADLINE_S = 60


def room_for(num_pages: int, page_bytes: int) -> int:
    """Return a capacity whose segments hold exactly `num_pages`, one each."""
    return num_pages * file_bytes_of(pitch_of(page_bytes), 1)


def test_readers_of_a_churning_store_get_the_right_page_or_none(stores: Any, pages: Any) -> None:
    writer = stores.open(capacity=room_for(6, pages.page_bytes))
    reader = stores.open()
    churned, all_good = threading.Event(), threading.Barrier(3, timeout=DEADLINE_S)

    def read(store: FileStore) -> set[str]:
        rng = random.Random(5)
        seen = set(pages.read(store, range(3)))
        all_good.wait()
        while not churned.is_set():
            seen.update(pages.read(store, [rng.randrange(40) for _ in range(4)]))
        return seen.union(pages.read(store, range(40)))

    pages.put(writer, range(3))
    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read, store) for store in (writer, reader)]
        all_good.wait()
        try:
            for i in range(1500):
                pages.put(writer, [i % 40, (i * 7) % 40])
        finally:
            churned.set()
        for outcomes in readers:
            assert outcomes.result(DEADLINE_S) == {"good", "missing"}, "never another page, and no false alarm"
    writer.audit()


def test_a_page_evicted_while_it_is_read_is_a_miss_and_no_damage(
    stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = room_for(2, pages.page_bytes)
    writer = stores.open(capacity=capacity)
    reader = stores.open()
    for store in (writer, reader):
        pages.put(writer, [1, 2])
        assert pages.read(store, [1, 2]) == ["good", "good"]
        read_blobs = Segment.read_blobs

        def evict_meanwhile(segment: Segment, slot: int, buffers: Any, read_blobs: Any = read_blobs) -> bool:
            read = read_blobs(segment, slot, buffers)
            monkeypatch.undo()
            pages.put(writer, [3, 4])
            return bool(read)

        monkeypatch.setattr(Segment, "read_blobs", evict_meanwhile)
        assert pages.read(store, [1]) == ["missing"]
        assert store.stats().error_pages == store.stats().quarantined_pages == 0
        assert pages.read(store, [3, 4]) == ["good", "good"]


def test_a_page_stored_anew_while_it_is_read_is_the_right_one_or_a_miss(
    stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.open(capacity=room_for(2, pages.page_bytes))
    pages.put(store, [1, 2])
    read_blobs = Segment.read_blobs

    def replace_meanwhile(segment: Segment, slot: int, buffers: Any) -> bool:
        monkeypatch.undo()
        pages.put(store, [3, 4])
        pages.put(store, [2, 1])
        return bool(read_blobs(segment, slot, buffers))

    monkeypatch.setattr(Segment, "read_blobs", replace_meanwhile)
    assert pages.read(store, [1]) == ["missing"]
    assert pages.read(store, [1, 2]) == ["good", "good"]


def test_a_file_stays_open_until_the_last_reader_is_out(
    stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.open(capacity="1MiB")
    pages.put(store, [1])
    read_blobs = Segment.read_blobs

    def give_up_meanwhile(segment: Segment, slot: int, buffers: Any) -> bool:
        monkeypatch.undo()
        store.remove_namespace(pages.namespace)
        assert stores.segments() == []
        os.fstat(segment.fd)  # raises where the file was closed under its reader
        return bool(read_blobs(segment, slot, buffers))

    monkeypatch.setattr(Segment, "read_blobs", give_up_meanwhile)
    assert pages.read(store, [1]) == ["missing"]
    assert store.stats().error_pages == 0


def test_a_segment_of_our_own_never_looks_like_another_processs(
    stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.open(capacity="1MiB")
    create = Segment.create
    looking = []

    def look_meanwhile(*args: Any, **options: Any) -> Segment:
        segment = create(*args, **options)
        looking.append(threading.Thread(target=store.exists, args=([pages.key(99)],)))
        looking[-1].start()
        looking[-1].join(0.05)
        return segment

    monkeypatch.setattr(Segment, "create", look_meanwhile)
    assert pages.put(store, range(3)) == [True] * 3
    for thread in looking:
        thread.join(20)
    assert looking
    assert store.num_segments() == (1, 0)


def test_a_page_that_another_thread_is_writing_is_awaited_not_written_twice(
    stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.open(capacity="1MiB")
    write_blobs = Segment.write_blobs
    others: list[Any] = []

    def put_meanwhile(segment: Segment, slot: int, blobs: Any) -> None:
        monkeypatch.undo()
        others.append(pool.submit(pages.put, store, [1]))
        write_blobs(segment, slot, blobs)

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(Segment, "write_blobs", put_meanwhile)
        assert pages.put(store, [1]) == [True]
        assert others[0].result(20) == [True]
    assert store.stats().put_pages == 1


@pytest.mark.parametrize("step", ["write_blobs", "write_headers"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_slot_whose_write_fails_fails_its_page_alone(
    stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch, step: str, code: int
) -> None:
    store = stores.open(capacity="1MiB")
    pages.put(store, [100])
    act = getattr(Segment, step)

    def fail_at_slot_3(segment: Segment, slot: int, what: Any) -> None:
        if slot <= 3 < slot + len(what):
            raise OSError(code, os.strerror(code))
        act(segment, slot, what)

    monkeypatch.setattr(Segment, step, fail_at_slot_3)
    assert pages.put(store, range(6)) == [True, True, False, True, True, True]
    monkeypatch.undo()
    stats = store.stats()
    assert (stats.error_pages, stats.dropped_pages) == ((1, 0) if code == errno.EIO else (0, 1))
    assert pages.read(store, range(6)) == ["good", "good", "missing", "good", "good", "good"]
    assert pages.put(store, range(6)) == [True] * 6
    store.audit()


def test_a_slot_that_cannot_be_read_is_a_counted_miss_of_its_page_alone(
    stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.open(capacity="1MiB")
    pages.put(store, range(6))
    read_blobs = Segment.read_blobs

    def fail_at_slot_3(segment: Segment, slot: int, buffers: Any) -> bool:
        if slot <= 3 < slot + len(buffers):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return bool(read_blobs(segment, slot, buffers))

    monkeypatch.setattr(Segment, "read_blobs", fail_at_slot_3)
    assert pages.read(store, range(6)) == ["good", "good", "good", "missing", "good", "good"]
    assert store.stats().error_pages == store.stats().quarantined_pages == 1
    assert store.exists([pages.key(3)]) == [False]


def test_a_page_of_another_process_stored_anew_while_it_is_read_is_a_miss_and_no_damage(
    stores: Any, pages_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = pages_of(sealer=Sealer(clock=itertools.count(1).__next__))
    writer = stores.open(capacity=room_for(1, pages.page_bytes))
    pages.put(writer, [1])
    reader = stores.open()
    assert pages.read(reader, [1]) == ["good"]
    read_blobs = Segment.read_blobs

    def replace_around(segment: Segment, slot: int, buffers: Any) -> bool:
        monkeypatch.undo()
        pages.put(writer, [2])
        read = read_blobs(segment, slot, buffers)
        pages.put(writer, [1])
        return bool(read)

    monkeypatch.setattr(Segment, "read_blobs", replace_around)
    assert pages.read(reader, [1]) == ["missing"], "its header vouches for bytes that were not read"
    assert pages.read(reader, [1]) == ["good"]


def test_a_table_that_cannot_be_read_costs_its_segment_only(
    stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.open(capacity=room_for(3, pages.page_bytes))
    pages.put(store, range(3))
    reader = stores.open(read_only=True)
    bad = stores.segments()[0].name
    read_table = Segment.read_table

    def bad_sector(segment: Segment) -> bytes:
        if segment.path.name == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_table(segment)

    monkeypatch.setattr(Segment, "read_table", bad_sector)
    late_reader = stores.open(read_only=True)
    pages.put(store, [3])  # evicts page 0
    store.close()
    for opened in (stores.open(), late_reader):
        assert list(opened.faults()) == [bad]
        assert sorted(pages.read(opened, range(1, 4))).count("good") >= 2
    assert pages.read(reader, [99]) == ["missing"]


@pytest.mark.parametrize("call", ["put", "remove", "get"])
def test_a_call_that_begins_as_the_store_closes_touches_no_file_opened_since(
    stores: Any, pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The numbers of closed files are given to files that are opened then."""
    store = stores.open()
    pages.put(store, [1])
    others = tmp_path / "others"
    others.write_bytes(b"o" * (1 << 18))
    opened: list[int] = []

    def close_then() -> None:
        monkeypatch.undo()
        store.close()
        opened.extend(os.open(others, os.O_RDWR) for _ in range(8))

    monkeypatch.setattr(store, "_check_open", close_then)
    acts = {
        "put": lambda: pages.put(store, [2]) == [False],
        "remove": lambda: store.remove(pages.keys([1])) == 0,
        "get": lambda: pages.read(store, [1]) == ["missing"],
    }
    assert acts[call]()
    for fd in opened:
        os.close(fd)
    assert others.read_bytes() == b"o" * (1 << 18)


def test_a_store_that_is_closed_while_it_looks_at_its_neighbours_closes_no_file_under_that(
    stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = stores.open(), stores.open()
    pages.put(writer, [1])
    assert pages.read(reader, [1]) == ["good"]
    closing = threading.Thread(target=reader.close)
    looked: list[int] = []

    def close_meanwhile(segment: Segment) -> bool:
        if not closing.ident:
            closing.start()
        closing.join(0.3)
        looked.append(os.fstat(segment.fd).st_nlink)  # raises where the file was closed
        return False

    monkeypatch.setattr(Segment, "is_unlinked", close_meanwhile)
    assert pages.read(reader, [2]) == ["missing"]
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert looked == [1]
    reader._neighbours.refresh()
    assert looked == [1], "it looks no more"
