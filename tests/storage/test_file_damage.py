"""Every kind of damage to a page on disk is a miss that is counted, and never data; and the store goes on."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from kvhoist.messages import StorageKey
from kvhoist.storage import Buffer, Sealer
from kvhoist.storage.record import HEADER_BYTES, IDENTITY

NUM = 12
PAGE_BYTES = 6000
PITCH = 8192


@pytest.mark.parametrize("byte", range(HEADER_BYTES))
def test_a_flipped_bit_in_any_byte_of_a_header_is_a_counted_miss(damage: Any, pages: Any, byte: int) -> None:
    def flip(file: Any) -> None:
        file.bytes[file.header(3).start + byte] ^= 1 << byte % 8

    store = damage(flip)
    outcomes, _ = pages.fetch(store)
    assert outcomes == ["good"] * 3 + ["missing"] + ["good"] * (NUM - 4)
    assert store.stats().quarantined_pages == 1
    pages.check_usable(store, {3})


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, PAGE_BYTES - 1])
def test_a_flipped_bit_in_a_blob_is_a_counted_miss(damage: Any, pages: Any, at: int) -> None:
    def flip(file: Any) -> None:
        file.bytes[file.blob(5).start + at] ^= 4

    store = damage(flip)
    outcomes, _ = pages.fetch(store)
    assert outcomes[5].startswith("corrupt: blob damaged")
    assert outcomes.count("good") == NUM - 1
    assert store.stats().quarantined_pages == 1
    pages.check_usable(store, {5})


def test_swapped_blobs_are_two_misses(damage: Any, pages: Any) -> None:
    store = damage(lambda file: file.swap(file.blob(1), file.blob(2)))
    outcomes, _ = pages.fetch(store)
    assert [i for i, outcome in enumerate(outcomes) if outcome.startswith("corrupt: blob damaged")] == [1, 2]
    pages.check_usable(store, {1, 2})


def test_swapped_headers_are_two_misses(damage: Any, pages: Any) -> None:
    store = damage(lambda file: file.swap(file.header(1), file.header(2)))
    outcomes, _ = pages.fetch(store)
    assert outcomes.count("good") == NUM - 2
    pages.check_usable(store, {1, 2})


def test_pages_that_moved_whole_are_still_themselves(damage: Any, pages: Any) -> None:
    def move(file: Any) -> None:
        file.swap(file.header(1), file.header(2))
        file.swap(file.blob(1), file.blob(2))

    assert pages.fetch(damage(move))[0] == ["good"] * NUM


def test_a_page_of_another_key_in_a_slot_is_never_that_key(damage: Any, pages: Any) -> None:
    def copy(file: Any) -> None:
        file.bytes[file.header(1)] = file.bytes[file.header(2)]
        file.bytes[file.blob(1)] = file.bytes[file.blob(2)]

    store = damage(copy)
    outcomes, _ = pages.fetch(store)
    assert outcomes[1] == "missing"
    assert outcomes.count("good") == NUM - 1


def test_a_blob_that_was_half_written_is_a_miss(damage: Any, pages: Any) -> None:
    def tear(file: Any) -> None:
        blob = file.blob(7)
        file.bytes[blob.start + 4096 : blob.stop] = bytes(blob.stop - blob.start - 4096)

    store = damage(tear)
    assert pages.fetch(store)[0][7].startswith("corrupt: blob damaged")
    pages.check_usable(store, {7})


def test_a_header_that_was_half_written_is_a_miss(damage: Any, pages: Any) -> None:
    def tear(file: Any) -> None:
        header = file.header(7)
        file.bytes[header.start + 128 : header.stop] = bytes(128)

    store = damage(tear)
    assert pages.fetch(store)[0][7] == "missing"
    assert store.stats().quarantined_pages == 1
    pages.check_usable(store, {7})


def test_zeroed_blobs_are_misses(damage: Any, pages: Any) -> None:
    def zero(file: Any) -> None:
        file.bytes[file.blobs_at :] = bytes(len(file.bytes) - file.blobs_at)

    store = damage(zero)
    assert all(outcome.startswith("corrupt") for outcome in pages.fetch(store)[0])
    assert store.stats().quarantined_pages == NUM
    pages.check_usable(store, set(range(NUM)))


def test_a_zeroed_table_is_an_empty_segment(damage: Any, pages: Any) -> None:
    def zero(file: Any) -> None:
        file.bytes[8192 : file.blobs_at] = bytes(file.blobs_at - 8192)

    store = damage(zero)
    assert set(pages.fetch(store)[0]) == {"missing"}
    pages.check_usable(store, set(range(NUM)))


def test_a_damaged_page_of_another_process_is_remembered_as_bad(stores: Any, pages: Any, segment_file: Any) -> None:
    owner, reader = stores.open(), stores.open()
    pages.put(owner, range(NUM))
    file = segment_file(stores.segments()[0])
    fd = os.open(file.path, os.O_RDWR)
    os.pwrite(fd, b"damage", file.blob(2).start)
    os.close(fd)
    assert pages.fetch(reader)[0][2].startswith("corrupt: blob damaged")
    assert reader.stats().quarantined_pages == 1
    pages.put(owner, [50])
    assert pages.read(reader, [2, 50]) == ["missing", "good"], "looking again does not bring it back"
    assert pages.fetch(owner)[0][2].startswith("corrupt")
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
        pages.fetch(damaged)
        damaged.audit()
        damaged.close()
        for left in stores.segments():
            left.unlink()


class Blind(Sealer):
    """A sealer that finds nothing wrong: the negative control."""

    def check(self, key: StorageKey, header: bytes, blob: Buffer) -> str | None:
        return None


def test_with_the_check_taken_out_the_damage_goes_through(damage: Any, pages: Any) -> None:
    def flip(file: Any) -> None:
        file.bytes[file.blob(5).start] ^= 4

    outcomes, buffers = pages.fetch(damage(flip), Blind())
    assert outcomes == ["good"] * NUM
    assert buffers[5] != pages.blob(5)
    assert buffers[4] == pages.blob(4)


def test_pages_of_another_secret_are_misses_and_can_be_stored_anew(stores: Any, pages: Any, pages_of: Any) -> None:
    unsigned, signed = pages, pages_of(sealer=Sealer(b"secret"))
    store = stores.open()
    unsigned.put(store, range(NUM))
    outcomes, _ = pages.fetch(store, sealer=signed.sealer)
    assert set(outcomes) == {"corrupt: unsigned record, but this store has a secret"}
    assert all(signed.put(store, range(NUM)))
    assert signed.read(store, range(NUM)) == ["good"] * NUM


def test_identity_stands_where_the_index_reads_it(stores: Any, pages: Any) -> None:
    store = stores.open()
    pages.put(store, range(NUM))
    headers = dict(store.records())
    assert {key: header[IDENTITY] for key, header in headers.items()}.keys() == set(pages.keys(range(NUM)))
