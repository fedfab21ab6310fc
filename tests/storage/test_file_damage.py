"""Every kind of damage to a folder is a miss that is counted, and never data; and the store goes on."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvhoist.messages import StorageKey
from kvhoist.storage import Buffer, Sealer, StorageIO
from kvhoist.storage.record import HEADER_BYTES, IDENTITY

NUM = 12
TABLE_AT = 8192
PAGE_BYTES = 6000
PITCH = 8192


class SegmentFile:
    """A closed segment file, to be damaged: page `i` lies in slot `i`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = bytearray(path.read_bytes())
        num_slots = int.from_bytes(self.bytes[56:64], "little")
        self.blobs_at = len(self.bytes) - num_slots * PITCH

    def header(self, i: int) -> slice:
        return slice(TABLE_AT + i * HEADER_BYTES, TABLE_AT + (i + 1) * HEADER_BYTES)

    def blob(self, i: int) -> slice:
        return slice(self.blobs_at + i * PITCH, self.blobs_at + i * PITCH + PAGE_BYTES)

    def swap(self, a: slice, b: slice) -> None:
        self.bytes[a], self.bytes[b] = self.bytes[b], self.bytes[a]

    def save(self) -> None:
        self.path.write_bytes(self.bytes)


@pytest.fixture
def damage(stores: Any, pages: Any) -> Callable[[Callable[[SegmentFile], None]], Any]:
    """Store NUM pages, close, damage the segment file, and return the store opened again."""

    def run(act: Callable[[SegmentFile], None]) -> Any:
        store = stores.open(capacity="1MiB")
        assert all(pages.put(store, range(NUM)))
        store.close()
        file = SegmentFile(stores.segments()[0])
        act(file)
        file.save()
        return stores.open(capacity="1MiB")

    return run


def fetch(store: Any, pages: Any, sealer: Sealer | None = None) -> tuple[list[str], list[memoryview]]:
    """Prefetch all pages as the data plane does; return each page's outcome and bytes."""
    io = StorageIO(store, sealer or Sealer(), num_threads=1)
    buffers = [memoryview(bytearray(PAGE_BYTES)) for _ in range(NUM)]
    outcomes = io.prefetch(pages.keys(range(NUM)), buffers).result(20)
    assert io.close()
    for i, reason in enumerate(outcomes.reasons):
        assert reason is not None or sealer is not None or buffers[i] == pages.blob(i), "wrong bytes passed"
    return ["good" if reason is None else reason for reason in outcomes.reasons], buffers


def check_usable(store: Any, pages: Any, bad: set[int]) -> None:
    """The damaged pages are gone, the others are served, and all can be stored again."""
    assert store.exists(pages.keys(range(NUM))) == [i not in bad for i in range(NUM)]
    assert all(pages.put(store, range(NUM + 5)))
    assert pages.read(store, range(NUM + 5)) == ["good"] * (NUM + 5)
    store.audit()


@pytest.mark.parametrize("byte", range(HEADER_BYTES))
def test_a_flipped_bit_in_any_byte_of_a_header_is_a_counted_miss(damage: Any, pages: Any, byte: int) -> None:
    def flip(file: SegmentFile) -> None:
        file.bytes[file.header(3).start + byte] ^= 1 << byte % 8

    store = damage(flip)
    outcomes, _ = fetch(store, pages)
    assert outcomes == ["good"] * 3 + ["missing"] + ["good"] * (NUM - 4)
    assert store.stats().quarantined_pages == 1
    check_usable(store, pages, {3})


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, PAGE_BYTES - 1])
def test_a_flipped_bit_in_a_blob_is_a_counted_miss(damage: Any, pages: Any, at: int) -> None:
    def flip(file: SegmentFile) -> None:
        file.bytes[file.blob(5).start + at] ^= 4

    store = damage(flip)
    outcomes, _ = fetch(store, pages)
    assert outcomes[5].startswith("corrupt: blob damaged")
    assert outcomes.count("good") == NUM - 1
    assert store.stats().quarantined_pages == 1
    check_usable(store, pages, {5})


def test_swapped_blobs_are_two_misses(damage: Any, pages: Any) -> None:
    store = damage(lambda file: file.swap(file.blob(1), file.blob(2)))
    outcomes, _ = fetch(store, pages)
    assert [i for i, outcome in enumerate(outcomes) if outcome.startswith("corrupt: blob damaged")] == [1, 2]
    check_usable(store, pages, {1, 2})


def test_swapped_headers_are_two_misses(damage: Any, pages: Any) -> None:
    store = damage(lambda file: file.swap(file.header(1), file.header(2)))
    outcomes, _ = fetch(store, pages)
    assert outcomes.count("good") == NUM - 2
    check_usable(store, pages, {1, 2})


def test_pages_that_moved_whole_are_still_themselves(damage: Any, pages: Any) -> None:
    def move(file: SegmentFile) -> None:
        file.swap(file.header(1), file.header(2))
        file.swap(file.blob(1), file.blob(2))

    assert fetch(damage(move), pages)[0] == ["good"] * NUM


def test_a_page_of_another_key_in_a_slot_is_never_that_key(damage: Any, pages: Any) -> None:
    def copy(file: SegmentFile) -> None:
        file.bytes[file.header(1)] = file.bytes[file.header(2)]
        file.bytes[file.blob(1)] = file.bytes[file.blob(2)]

    store = damage(copy)
    outcomes, _ = fetch(store, pages)
    assert outcomes[1] == "missing"
    assert outcomes.count("good") == NUM - 1


def test_a_blob_that_was_half_written_is_a_miss(damage: Any, pages: Any) -> None:
    def tear(file: SegmentFile) -> None:
        blob = file.blob(7)
        file.bytes[blob.start + 4096 : blob.stop] = bytes(blob.stop - blob.start - 4096)

    store = damage(tear)
    assert fetch(store, pages)[0][7].startswith("corrupt: blob damaged")
    check_usable(store, pages, {7})


def test_a_header_that_was_half_written_is_a_miss(damage: Any, pages: Any) -> None:
    def tear(file: SegmentFile) -> None:
        header = file.header(7)
        file.bytes[header.start + 128 : header.stop] = bytes(128)

    store = damage(tear)
    assert fetch(store, pages)[0][7] == "missing"
    assert store.stats().quarantined_pages == 1
    check_usable(store, pages, {7})


def test_zeroed_blobs_are_misses(damage: Any, pages: Any) -> None:
    def zero(file: SegmentFile) -> None:
        file.bytes[file.blobs_at :] = bytes(len(file.bytes) - file.blobs_at)

    store = damage(zero)
    assert all(outcome.startswith("corrupt") for outcome in fetch(store, pages)[0])
    assert store.stats().quarantined_pages == NUM
    check_usable(store, pages, set(range(NUM)))


def test_a_zeroed_table_is_an_empty_segment(damage: Any, pages: Any) -> None:
    def zero(file: SegmentFile) -> None:
        file.bytes[TABLE_AT : file.blobs_at] = bytes(file.blobs_at - TABLE_AT)

    store = damage(zero)
    assert set(fetch(store, pages)[0]) == {"missing"}
    check_usable(store, pages, set(range(NUM)))


@pytest.mark.parametrize("kept", [0, 100, 4095, 4096, 8192, 8192 + 700, 12288 + 3 * PITCH, 12288 + 3 * PITCH + 100])
def test_a_truncated_segment_serves_what_is_left(damage: Any, stores: Any, pages: Any, kept: int) -> None:
    def truncate(file: SegmentFile) -> None:
        del file.bytes[kept:]

    store = damage(truncate)
    outcomes, _ = fetch(store, pages)
    good = [i for i, outcome in enumerate(outcomes) if outcome == "good"]
    assert good == list(range(max(0, (kept - 12288) // PITCH)))
    assert all(pages.put(store, range(NUM + 5)))
    assert pages.read(store, range(NUM + 5)) == ["good"] * (NUM + 5)


def test_a_segment_truncated_under_an_open_store_is_misses(stores: Any, pages: Any) -> None:
    store = stores.open(capacity="1MiB")
    pages.put(store, range(NUM))
    os.truncate(stores.segments()[0], 12288 + 4 * PITCH)
    assert fetch(store, pages)[0] == ["good"] * 4 + ["missing"] * (NUM - 4)
    assert store.stats().quarantined_pages == NUM - 4
    check_usable(store, pages, set(range(4, NUM)))


@pytest.mark.parametrize("byte", [0, 8, 12, 16, 32, 48, 56, 64, 72, 1000, 4095])
def test_a_damaged_superblock_costs_its_segment_and_no_more(damage: Any, pages: Any, byte: int) -> None:
    def flip(file: SegmentFile) -> None:
        file.bytes[byte] ^= 1

    store = damage(flip)
    assert set(fetch(store, pages)[0]) == {"missing"}
    assert store.stats().quarantined_pages == 1
    check_usable(store, pages, set(range(NUM)))


def test_a_flipped_generation_loses_nothing(damage: Any, pages: Any) -> None:
    def flip(file: SegmentFile) -> None:
        file.bytes[4096] ^= 255

    assert fetch(damage(flip), pages)[0] == ["good"] * NUM


def test_a_segment_copied_from_another_folder_is_left_alone(stores: Any, pages: Any, tmp_path: Path) -> None:
    other = type(stores)(tmp_path / "other")
    theirs = other.open()
    pages.put(theirs, range(NUM))
    theirs.close()
    ours = stores.open()
    pages.put(ours, [100])
    ours.close()
    source = other.segments()[0]
    copied = stores.folder / "segments" / source.name
    shutil.copy(source, copied)
    store = stores.open()
    assert set(fetch(store, pages)[0]) == {"missing"}
    assert "another store" in store.faults()[source.name]
    assert copied.read_bytes() == source.read_bytes()
    assert pages.read(store, [100]) == ["good"]


def test_a_segment_copied_within_the_folder_is_left_alone(stores: Any, pages: Any) -> None:
    store = stores.open()
    pages.put(store, range(NUM))
    store.close()
    source = stores.segments()[0]
    shutil.copy(source, source.with_name("0" * 32 + ".seg"))
    again = stores.open()
    assert pages.read(again, range(NUM)) == ["good"] * NUM
    assert again.stats().num_pages == NUM
    assert "copy of another segment" in again.faults()["0" * 32 + ".seg"]


@pytest.mark.parametrize("content", [b"", bytes(100_000), b"hello " * 3000])
def test_a_file_that_is_no_segment_harms_nothing(stores: Any, pages: Any, content: bytes) -> None:
    store = stores.open()
    pages.put(store, range(NUM))
    store.close()
    (stores.folder / "segments" / ("f" * 32 + ".seg")).write_bytes(content)
    again = stores.open()
    assert pages.read(again, range(NUM)) == ["good"] * NUM
    assert pages.put(again, range(NUM, 50)) == [True] * (50 - NUM)


def test_what_a_killed_process_left_unfinished_is_cleared_away(stores: Any, pages: Any) -> None:
    stores.open().close()
    left = stores.folder / "segments" / ("a" * 32 + ".tmp")
    left.write_bytes(bytes(1000))
    stores.open()
    assert not left.exists()


def test_a_damaged_page_of_another_process_is_remembered_as_bad(stores: Any, pages: Any) -> None:
    owner, reader = stores.open(), stores.open()
    pages.put(owner, range(NUM))
    file = SegmentFile(stores.segments()[0])
    fd = os.open(file.path, os.O_RDWR)
    os.pwrite(fd, b"damage", file.blob(2).start)
    os.close(fd)
    assert fetch(reader, pages)[0][2].startswith("corrupt: blob damaged")
    assert reader.stats().quarantined_pages == 1
    pages.put(owner, [50])
    assert pages.read(reader, [2, 50]) == ["missing", "good"], "looking again does not bring it back"
    assert fetch(owner, pages)[0][2].startswith("corrupt")
    pages.put(owner, [2])
    assert pages.read(reader, range(NUM)) == ["good"] * NUM


def test_random_damage_is_never_data(stores: Any, pages: Any) -> None:
    store = stores.open(capacity="1MiB")
    pages.put(store, range(NUM))
    store.close()
    path = stores.segments()[0]
    original = path.read_bytes()
    rng = random.Random(7)
    for _ in range(60):
        content = bytearray(original)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(12288 + NUM * PITCH)
            length = rng.choice([1, 8, 512, 4096])
            content[at : at + length] = rng.choice([bytes, rng.randbytes])(length)
        path.write_bytes(content[: len(original)])
        damaged = stores.open(capacity="1MiB")
        fetch(damaged, pages)
        damaged.audit()
        damaged.close()
        for left in stores.segments():
            left.unlink()


class Blind(Sealer):
    """A sealer that finds nothing wrong: the negative control."""

    def check(self, key: StorageKey, header: bytes, blob: Buffer) -> str | None:
        return None


def test_with_the_check_taken_out_the_damage_goes_through(damage: Any, pages: Any) -> None:
    def flip(file: SegmentFile) -> None:
        file.bytes[file.blob(5).start] ^= 4

    outcomes, buffers = fetch(damage(flip), pages, Blind())
    assert outcomes == ["good"] * NUM
    assert buffers[5] != pages.blob(5)
    assert buffers[4] == pages.blob(4)


def test_pages_of_another_secret_are_misses_and_can_be_stored_anew(stores: Any, pages: Any, pages_of: Any) -> None:
    unsigned, signed = pages, pages_of(sealer=Sealer(b"secret"))
    store = stores.open()
    unsigned.put(store, range(NUM))
    outcomes, _ = fetch(store, pages, sealer=signed.sealer)
    assert set(outcomes) == {"corrupt: unsigned record, but this store has a secret"}
    assert all(signed.put(store, range(NUM)))
    assert signed.read(store, range(NUM)) == ["good"] * NUM


def test_identity_stands_where_the_index_reads_it(stores: Any, pages: Any) -> None:
    store = stores.open()
    pages.put(store, range(NUM))
    headers = dict(store.records())
    assert {key: header[IDENTITY] for key, header in headers.items()}.keys() == set(pages.keys(range(NUM)))
