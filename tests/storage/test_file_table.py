"""The owner's table of a segment: changes that come at once reach the disk together, whole and in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from kvhoist.storage.file.direct import ALIGNMENT
from kvhoist.storage.file.table import OwnTable

PATIENCE_S = 20.0
BLOCKS = 6


class Disk:
    """What was written, write by write; `held` holds one up in the middle."""

    def __init__(self) -> None:
        self.bytes = bytearray(BLOCKS * ALIGNMENT)
        self.offsets: list[int] = []
        self.tellings: list[int] = []
        self.fails_at: int | None = None
        self.entered, self._go = threading.Event(), threading.Event()
        self._go.set()

    def write(self, blocks: memoryview, offset: int) -> None:
        self.entered.set()
        before = bytes(blocks)
        assert self._go.wait(PATIENCE_S)
        assert bytes(blocks) == before, "blocks changed on their way"
        self.offsets.append(offset)
        if self.fails_at == offset:
            raise OSError(5, "this disk broke")
        self.bytes[offset : offset + len(blocks)] = blocks
        if offset == 0:
            self.tellings.append(int.from_bytes(blocks[:8], "little"))

    @contextmanager
    def held(self) -> Iterator[None]:
        self._go.clear()
        self.entered.clear()
        yield
        self._go.set()


def table_over(disk: Disk) -> OwnTable:
    return OwnTable(b"old", BLOCKS * ALIGNMENT, disk.write)


def test_a_change_reaches_the_disk_in_whole_blocks_and_the_generation_after_it() -> None:
    disk = Disk()
    table = table_over(disk)
    table.write(b"new", ALIGNMENT - 1, tells=True)
    assert disk.offsets == [ALIGNMENT, 0]
    assert disk.bytes[ALIGNMENT : ALIGNMENT + 3] == b"old"
    assert disk.bytes[2 * ALIGNMENT - 1 : 2 * ALIGNMENT + 2] == b"new"
    assert table.read(ALIGNMENT - 1, 3) == b"new"
    told = bytes(disk.bytes[:8])
    assert any(told)
    table.write(b"gone", 0, tells=False)
    assert disk.offsets == [ALIGNMENT, 0, ALIGNMENT]
    assert disk.bytes[:8] == told


def write_behind_a_held_one(
    disk: Disk, table: OwnTable, fails_at: int | None = None, *, tells: bool = False
) -> list[BaseException | None]:
    """Change four neighbouring blocks while a write of another one is under way; return what each thread raised."""
    with ThreadPoolExecutor(5) as pool:
        with disk.held():
            first = pool.submit(table.write, b"first", 4 * ALIGNMENT, tells=tells)
            assert disk.entered.wait(PATIENCE_S)
            rest = [pool.submit(table.write, b"%d" % i * 9, i * ALIGNMENT, tells=i == 2) for i in range(4)]
            until = time.monotonic() + PATIENCE_S
            while not all(table.read(i * ALIGNMENT, 1) == b"%d" % i for i in range(4)):
                assert time.monotonic() < until
            disk.fails_at = fails_at
        assert first.exception(PATIENCE_S) is None
        return [future.exception(PATIENCE_S) for future in rest]


def test_changes_that_come_while_one_is_written_share_the_next_write() -> None:
    disk = Disk()
    assert write_behind_a_held_one(disk, table_over(disk)) == [None] * 4
    assert disk.offsets == [5 * ALIGNMENT, ALIGNMENT, 0]
    for i in range(4):
        assert disk.bytes[(i + 1) * ALIGNMENT :][:9] == b"%d" % i * 9


def test_a_generation_that_others_need_not_wait_for_goes_with_their_headers() -> None:
    disk = Disk()
    assert write_behind_a_held_one(disk, table_over(disk), tells=True) == [None] * 4
    assert disk.offsets == [5 * ALIGNMENT, 0, 0]
    told = disk.tellings
    assert len(told) == 2, "once with the four headers, of the first; once after them"
    assert told == sorted(set(told))


def test_a_generation_is_told_though_the_write_that_carried_it_failed() -> None:
    disk = Disk()
    assert all(write_behind_a_held_one(disk, table_over(disk), fails_at=0, tells=True))
    assert disk.offsets == [5 * ALIGNMENT, 0, 0]


def test_a_shared_write_that_fails_fails_for_all_and_the_next_one_mends_it() -> None:
    disk = Disk()
    table = table_over(disk)
    failures = write_behind_a_held_one(disk, table, fails_at=ALIGNMENT)
    assert [str(failure) for failure in failures] == ["[Errno 5] this disk broke"] * 4
    assert len({id(failure) for failure in failures}) == 4
    disk.fails_at = None
    table.write(b"again", 0, tells=True)
    assert disk.bytes[ALIGNMENT : ALIGNMENT + 5] == b"again"
    assert not any(disk.bytes[2 * ALIGNMENT : 5 * ALIGNMENT])


def test_a_generation_that_cannot_be_written_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    disk.fails_at = 0
    table_over(disk).write(b"new", 0, tells=True)
    assert disk.bytes[ALIGNMENT : ALIGNMENT + 3] == b"new"
    assert "other processes cannot see new pages yet" in caplog.text
