"""O_DIRECT: the same bytes by every way to the disk, no copy of what lies aligned, and what a file system refuses."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhoist.errors import ConfigError, StoreUnavailableError
from kvhoist.storage.base import address_of
from kvhoist.storage.file import direct
from kvhoist.storage.file.direct import ALIGNMENT, DIRECT_FROM_BYTES, Direct, plan_calls
from kvhoist.storage.file.vectored import MAX_BUFFERS

BOUNCE_BYTES = 1 << 20
FORMAT_FILE = "kvhoist-store.json"
PAGE_BYTES = 3 * ALIGNMENT


def aligned(num_bytes: int, skew: int = 0) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes + skew or 1))[skew : skew + num_bytes]


def is_direct(fd: int) -> bool:
    return bool(int(Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0], 8) & os.O_DIRECT)


class Calls:
    """Counts what goes to disk with O_DIRECT, and may fail, or shorten, what `fault` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fault: Any = None) -> None:
        self.direct: list[list[memoryview]] = []
        for name in ("pwritev", "preadv"):
            monkeypatch.setattr(os, name, self._counting(name, getattr(os, name), fault))

    def _counting(self, name: str, real: Any, fault: Any) -> Any:
        def call(fd: int, buffers: Sequence[Any], offset: int) -> int:
            if is_direct(fd):
                self.direct.append(list(buffers))
                buffers = list(buffers) if fault is None else fault(name, list(buffers), offset)
            return int(real(fd, buffers, offset))

        return call


@pytest.fixture
def big(pages_of: Any) -> Any:
    """Pages of three blocks, whose blobs lie aligned."""
    pages = pages_of(page_bytes=PAGE_BYTES)
    blob_of = pages.blob
    kept: dict[int, memoryview] = {}

    def blob(i: int) -> memoryview:
        if i not in kept:
            kept[i] = aligned(PAGE_BYTES)
            kept[i][:] = blob_of(i)
        return kept[i]

    pages.blob = blob
    return pages


@given(
    lengths=st.lists(st.integers(0, 5 * ALIGNMENT), min_size=1, max_size=8),
    skews=st.lists(st.sampled_from([0, 0, 1, 512]), min_size=8, max_size=8),
    bounce_blocks=st.integers(1, 6),
)
def test_a_plan_covers_every_byte_once_and_bounces_only_what_is_not_aligned(
    lengths: list[int], skews: list[int], bounce_blocks: int
) -> None:
    pitch = 6 * ALIGNMENT
    blobs = [aligned(length, skew) for length, skew in zip(lengths, skews, strict=False)]
    covered = end = 0
    for pieces in plan_calls(blobs, pitch, bounce_blocks * ALIGNMENT):
        assert len(pieces) <= MAX_BUFFERS
        assert pieces[0].offset >= end, "calls follow one another"
        end, used = pieces[0].offset, 0
        for offset, view, bounce_at in pieces:
            assert offset == end, "no gap inside of a call"
            assert offset % ALIGNMENT == 0
            whole_blocks = address_of(view) % ALIGNMENT == 0 and len(view) % ALIGNMENT == 0
            assert bounce_at is not None or whole_blocks
            rounded = -(-len(view) // ALIGNMENT) * ALIGNMENT
            if bounce_at is not None:
                assert bounce_at == used
                used += rounded
                assert used <= bounce_blocks * ALIGNMENT
                assert skews[offset // pitch] or len(view) < ALIGNMENT, "an aligned block is copied"
            number, begin = divmod(offset, pitch)
            assert address_of(view) == address_of(blobs[number]) + begin
            covered += len(view)
            end += rounded
    assert covered == sum(map(len, blobs))


@pytest.mark.parametrize("skew", [0, 1, 512])
@pytest.mark.parametrize("page_bytes", [1, 4095, 4096, 3 * 4096 + 5, BOUNCE_BYTES + 4096 + 1])
def test_direct_and_cached_stores_read_each_other(stores: Any, pages_of: Any, page_bytes: int, skew: int) -> None:
    pages = pages_of(page_bytes=page_bytes)
    for first, (writes, reads) in enumerate([("on", "off"), ("off", "on"), ("on", "on")]):
        ids = range(3 * first, 3 * first + 3)
        store = stores.open(capacity="64MiB", direct=writes)
        assert store.is_direct == (writes == "on")
        blobs = [aligned(page_bytes, skew) for _ in ids]
        for i, blob in zip(ids, blobs, strict=True):
            blob[:] = pages.blob(i)
        headers = [pages.sealer.seal(pages.key(i), blob) for i, blob in zip(ids, blobs, strict=True)]
        assert all(store.put(pages.keys(ids), headers, blobs))
        store.close()
        again = stores.open(capacity="64MiB", direct=reads)
        targets = [aligned(page_bytes, skew) for _ in ids]
        assert again.get(pages.keys(ids), targets) == headers
        assert targets == blobs
        again.close()


def test_neighbours_go_in_one_call_and_no_aligned_page_is_copied(
    stores: Any, big: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.open(direct="on")
    calls = Calls(monkeypatch)
    assert all(big.put(store, range(20)))
    blobs, headers, generation = calls.direct
    assert [address_of(buffer) for buffer in blobs] == [address_of(big.blob(i)) for i in range(20)]
    targets = [aligned(PAGE_BYTES) for _ in range(20)]
    assert None not in store.get(big.keys(range(20)), targets)
    assert [address_of(buffer) for buffer in calls.direct[3]] == [address_of(target) for target in targets]
    assert [list(map(len, call)) for call in (headers, generation)] == [[2 * ALIGNMENT], [ALIGNMENT]]
    assert len(calls.direct) == 4, "the owner need not read its headers"


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
@pytest.mark.parametrize("page_bytes", [4096, DIRECT_FROM_BYTES - ALIGNMENT, DIRECT_FROM_BYTES])
def test_small_pages_go_through_the_page_cache_unless_they_are_told_not_to(
    stores: Any, pages_of: Any, monkeypatch: pytest.MonkeyPatch, page_bytes: int, mode: str
) -> None:
    monkeypatch.setattr(direct, "DIRECT_FROM_BYTES", DIRECT_FROM_BYTES)
    pages = pages_of(page_bytes=page_bytes)
    store = stores.open(capacity="8MiB", direct=mode)
    calls = Calls(monkeypatch)
    assert all(pages.put(store, range(3)))
    assert pages.read(store, range(3)) == ["good"] * 3
    assert bool(calls.direct) == (mode == "on" or (mode == "auto" and page_bytes >= DIRECT_FROM_BYTES))


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT])
def test_a_refusal_in_the_middle_falls_back_with_one_line(
    stores: Any, big: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    store = stores.open(direct="auto")
    assert all(big.put(store, range(5)))
    refused = []

    def refuse(name: str, buffers: list[Any], offset: int) -> list[Any]:
        refused.append(name)
        raise OSError(code, os.strerror(code))

    Calls(monkeypatch, refuse)
    with caplog.at_level(logging.WARNING):
        assert all(big.put(store, range(5, 10)))
        assert big.read(store, range(10)) == ["good"] * 10
    assert refused == ["pwritev"], "asked once, and then no more"
    assert [record.message for record in caplog.records if "O_DIRECT" in record.message] == [
        f"the file system refuses O_DIRECT ([Errno {code}] {os.strerror(code)}): through the page cache from now on"
    ]
    assert not store.is_direct
    assert store.stats().error_pages == 0


@pytest.mark.parametrize("part", [1, 100, 4096, 5000])
def test_short_calls_are_carried_on(stores: Any, big: Any, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """A call that moves `part` bytes of the first buffer, if aligned, and nothing at all otherwise."""

    def shorten(name: str, buffers: list[Any], offset: int) -> list[Any]:
        return [buffers[0][:part]] if part % ALIGNMENT == 0 else []

    store = stores.open(direct="on")
    Calls(monkeypatch, shorten)
    assert all(big.put(store, range(8)))
    assert big.read(store, range(8)) == ["good"] * 8
    assert store.is_direct
    assert store.stats().error_pages == 0


@pytest.mark.parametrize("direct", ["on", "off"])
def test_one_bad_page_is_one_page(stores: Any, big: Any, monkeypatch: pytest.MonkeyPatch, direct: str) -> None:
    store = stores.open(direct=direct)
    assert all(big.put(store, range(8)))
    bad = address_of(big.blob(12))
    reads = [aligned(PAGE_BYTES) for _ in range(8)]
    for name, call in (("pwritev", os.pwritev), ("preadv", os.preadv)):

        def fail(fd: int, buffers: Any, offset: int, real: Any = call) -> int:
            addresses = {address_of(buffer) for buffer in buffers if len(buffer) == PAGE_BYTES}
            if addresses & {bad, address_of(reads[3])}:
                raise OSError(errno.EIO, "a bad sector")
            return int(real(fd, buffers, offset))

        monkeypatch.setattr(os, name, fail)
    assert big.put(store, range(10, 15)) == [True, True, False, True, True]
    headers = store.get(big.keys(range(8)), reads)
    assert [header is None for header in headers] == [i == 3 for i in range(8)]
    assert store.stats().error_pages == 2
    assert store.is_direct == (direct == "on"), "a bad sector says nothing about O_DIRECT"


def without_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has no O_DIRECT, as some network mounts."""
    real = os.open

    def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", opened)


def test_auto_does_without_and_says_so_once(
    stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_direct(monkeypatch)
    with caplog.at_level(logging.WARNING):
        store = stores.open()
        assert all(pages.put(store, range(5)))
        assert pages.read(store, range(5)) == ["good"] * 5
    assert [record.message for record in caplog.records] == [
        f"{stores.folder} goes through the page cache: no O_DIRECT here (Invalid argument)"
    ]
    assert not store.is_direct


def test_on_is_refused_where_it_cannot_be_and_nothing_is_made(
    stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_direct(monkeypatch)
    with pytest.raises(StoreUnavailableError, match=r"no O_DIRECT.*got Invalid argument.*direct=auto"):
        stores.open(direct="on")
    assert list(stores.folder.parent.iterdir()) == []
    pages.put(stores.open(), [1])
    with pytest.raises(StoreUnavailableError, match="no O_DIRECT"):
        stores.open(direct="on", read_only=True)


def test_off_asks_nothing(stores: Any, pages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stores.open(direct="off")
    calls = Calls(monkeypatch)
    assert all(pages.put(store, range(5)))
    assert pages.read(store, range(5)) == ["good"] * 5
    assert calls.direct == []


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"got direct='perhaps'; valid choices: auto, on, off"):
        Direct(tmp_path, "perhaps", format_file=FORMAT_FILE)
