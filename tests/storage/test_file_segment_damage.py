"""A segment file that was cut, copied, overwritten or is none: its pages are misses, the rest of the store goes on."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash

NUM = 12
PITCH = 8192


@pytest.mark.parametrize("kept", [0, 100, 4095, 4096, 8192, 8192 + 700, 12288 + 3 * PITCH, 12288 + 3 * PITCH + 100])
def test_a_truncated_segment_serves_what_is_left(damage: Any, stores: Any, pages: Any, kept: int) -> None:
    def truncate(file: Any) -> None:
        del file.bytes[kept:]

    store = damage(truncate)
    outcomes, _ = pages.fetch(store)
    good = [i for i, outcome in enumerate(outcomes) if outcome == "good"]
    assert good == list(range(max(0, (kept - 12288) // PITCH)))
    assert all(pages.put(store, range(NUM + 5)))
    assert pages.read(store, range(NUM + 5)) == ["good"] * (NUM + 5)


def test_a_segment_truncated_under_an_open_store_is_misses(stores: Any, pages: Any) -> None:
    store = stores.open(capacity="1MiB")
    pages.put(store, range(NUM))
    os.truncate(stores.segments()[0], 12288 + 4 * PITCH)
    assert pages.fetch(store)[0] == ["good"] * 4 + ["missing"] * (NUM - 4)
    assert store.stats().quarantined_pages == NUM - 4
    pages.check_usable(store, set(range(4, NUM)))


@pytest.mark.parametrize("byte", [0, 8, 12, 16, 32, 48, 56, 64, 72, 1000, 4095])
def test_a_damaged_superblock_costs_its_segment_and_no_more(damage: Any, pages: Any, byte: int) -> None:
    def flip(file: Any) -> None:
        file.bytes[byte] ^= 1

    store = damage(flip)
    assert set(pages.fetch(store)[0]) == {"missing"}
    assert store.stats().quarantined_pages == 1
    pages.check_usable(store, set(range(NUM)))


def test_a_flipped_generation_loses_nothing(damage: Any, pages: Any) -> None:
    def flip(file: Any) -> None:
        file.bytes[4096] ^= 255

    assert pages.fetch(damage(flip))[0] == ["good"] * NUM


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
    assert set(pages.fetch(store)[0]) == {"missing"}
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


@pytest.mark.parametrize(
    ("pitch_bytes", "num_slots"),
    [
        (0, 1),
        (0, 0),
        (4096, 0),
        (4097, 10),
        (4096, 1 << 60),
        (4096, 1 << 30),
        ((1 << 64) - 4096, 1),
        ((1 << 32) + 4096, 1),
        (8192, 17),
    ],
)
def test_a_superblock_of_an_impossible_shape_is_left_alone(
    damage: Any, stores: Any, pages: Any, pitch_bytes: int, num_slots: int
) -> None:
    def forge(file: Any) -> None:
        file.bytes[48:64] = struct.pack("<QQ", pitch_bytes, num_slots)
        file.bytes[4088:4096] = xxhash.xxh3_64_intdigest(bytes(file.bytes[:4088])).to_bytes(8, "little")

    store = damage(forge)
    assert "impossible shape" in "".join(store.faults().values())
    assert pages.read(store, range(NUM)) == ["missing"] * NUM
    assert all(pages.put(store, range(NUM)))
    assert len(stores.segments()) == 2


def test_what_lies_under_a_segments_name_may_be_anything(stores: Any, pages: Any, tmp_path: Path) -> None:
    store = stores.open()
    pages.put(store, [1])
    mine = tmp_path / "mine"
    mine.write_text("short")
    for name, make in (
        ("aa" * 16, os.mkfifo),
        ("bb" * 16, os.mkdir),
        ("cc" * 16, lambda path: os.symlink(mine, path)),
        ("dd" * 16, lambda path: os.symlink("/nowhere", path)),
    ):
        make(stores.folder / "segments" / f"{name}.seg")
        make(stores.folder / "segments" / f"{name}.tmp")
    reader = stores.open(read_only=True)
    assert pages.read(reader, [1]) == ["good"]
    assert pages.read(stores.open(), [1]) == ["good"]
    assert mine.read_text() == "short"
