"""Headers of someone who can compute every checksum: whatever they say, no wrong page, no crash, nothing out of bounds.

With a secret nothing passes that was not sealed for just this key, with just these bytes.
"""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvhoist.messages import REPLICATED, WHOLE, PageKey, Shard, StorageKey
from kvhoist.storage import FileStore, MemoryStore, Sealer, StorageIO
from kvhoist.storage.admin import describe, list_namespaces, remove, scrub
from kvhoist.storage.record import HEADER_BYTES, IDENTITY, header_fault, identity_of, key_of, read_header

NUM = 12
PAGE_BYTES = 6000
SECRET, OTHER_SECRET = b"a secret of some length", b"another secret of some length"
KEY = StorageKey(PageKey(bytes(range(32)), 0, bytes(range(32))), WHOLE)
BLOB = memoryview(bytes(range(250)) * 24)

u8, u16, u32, u64 = (
    st.sampled_from([0, 1, 2, (1 << bits - 1) - 1, 1 << bits - 1, (1 << bits) - 1]) | st.integers(0, (1 << bits) - 1)
    for bits in (8, 16, 32, 64)
)
FIELDS = {  # offset, format, values
    "version": (8, "<H", u16),
    "flags": (10, "<H", u16),
    "header length": (12, "<I", u32),
    "blob length": (16, "<Q", u64 | st.sampled_from([0, 5999, 6001, 8192, 8193])),
    "written at": (24, "<Q", u64),
    "group": (64, "<I", u32),
    "rank": (68, "<I", u32),
    "ranks": (72, "<I", u32),
    "chain hash length": (76, "<B", u8 | st.sampled_from([31, 33, 64, 65])),
    "spare": (80, "<Q", u64),
    "namespace": (32, "<Q", u64),
    "chain hash": (88, "<Q", u64),
    "chain hash tail": (144, "<Q", u64),
    "checksum": (152, "<Q", u64),
    "signature": (168, "<Q", u64),
    "tail": (200, "<Q", u64),
}
CHANGES = st.dictionaries(st.sampled_from(sorted(FIELDS)), st.none(), min_size=1, max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name][2] for name in names})
)


def reseal(header: bytes) -> bytes:
    return header[:-8] + xxhash.xxh3_64_intdigest(header[:-8]).to_bytes(8, "little")


def changed(header: bytes, changes: dict[str, int], *, for_blob: bytes | None = None) -> bytes:
    """Return `header` with other fields and sound checks; with the checksum of `for_blob`, where it is given."""
    forged = bytearray(header)
    if for_blob is not None:
        forged[152:168] = xxhash.xxh3_128_digest(for_blob)
    for name, value in changes.items():
        offset, form, _ = FIELDS[name]
        struct.pack_into(form, forged, offset, value)
    return reseal(bytes(forged))


@given(CHANGES)
@example({"chain hash length": 0})
@example({"chain hash length": 255})
@example({"flags": 0xFFFE})
@example({"header length": 0})
def test_a_header_passes_only_where_it_says_what_the_sealer_says(changes: dict[str, int]) -> None:
    sealed = Sealer().seal(KEY, BLOB)
    forged = changed(sealed, changes)
    same = forged[:8] == sealed[:8] and forged[12:24] == sealed[12:24] and forged[IDENTITY] == sealed[IDENTITY]
    sound = same and forged[8:10] == sealed[8:10] and forged[10] in (0, 1) and forged[11] == 0
    passes = Sealer().check(KEY, forged, BLOB) is None
    assert passes == (sound and forged[152:168] == sealed[152:168])
    header = read_header(forged)
    if header is not None:
        assert identity_of(header.key) == forged[IDENTITY], "the key that a header names is the key it is found under"
    else:
        assert header_fault(forged) is not None


@given(CHANGES, st.booleans(), st.booleans())
def test_with_a_secret_no_other_header_passes(changes: dict[str, int], signed_by_another: bool, other: bool) -> None:
    blob = memoryview(bytes(BLOB[::-1])) if other else BLOB
    honest = Sealer(SECRET, clock=lambda: 1.0)
    sealed = (Sealer(OTHER_SECRET) if signed_by_another else honest).seal(KEY, BLOB)
    forged = changed(sealed, {"flags": 1, **changes}, for_blob=blob)
    passes = honest.check(KEY, forged, blob) is None
    assert passes == (forged[:200] == honest.seal(KEY, BLOB)[:200] and blob == BLOB)


@pytest.fixture
def spoilt(stores: Any, pages: Any, segment_file: Any) -> Any:
    """Writes headers and blobs of a stranger into slots of a closed folder with NUM pages."""
    store = stores.open(capacity="1MiB")
    assert all(pages.put(store, range(NUM)))
    store.close()
    path: Path = stores.segments()[0]
    original = path.read_bytes()

    def spoil(slots: dict[int, tuple[bytes, bytes | None]]) -> None:
        for left in stores.segments():
            left.unlink()
        path.write_bytes(original)
        file = segment_file(path)
        for slot, (header, blob) in slots.items():
            file.bytes[file.header(slot)] = header
            if blob is not None:
                file.bytes[file.blob(slot)] = blob
        file.save()

    return spoil


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.integers(0, NUM - 1), CHANGES, min_size=1, max_size=4))
@example({0: {"chain hash length": 0}, 1: {"chain hash length": 65}, 2: {"blob length": 0}, 3: {"spare": 1}})
@example({0: {"blob length": 8192, "written at": (1 << 64) - 1}, 1: {"blob length": 8193}, 2: {"ranks": 0, "rank": 7}})
def test_a_folder_of_hostile_headers_is_opened_listed_scrubbed_and_cleared(
    stores: Any, pages: Any, spoilt: Any, slots: dict[int, dict[str, int]]
) -> None:
    headers = {i: changed(pages.sealer.seal(pages.key(i), pages.blob(i)), changes) for i, changes in slots.items()}
    spoilt({i: (header, None) for i, header in headers.items()})
    tracemalloc.start()
    for read_only in (True, False):
        with FileStore(stores.folder, capacity="1MiB", read_only=read_only) as store:
            outcomes = pages.read(store, range(NUM))
            assert "WRONG" not in outcomes
            assert all(outcomes[i] == "good" for i in range(NUM) if i not in slots)
            for key, raw in store.records():
                assert identity_of(key) == raw[IDENTITY]
            store.audit()
    assert sum(summary.num_pages for summary in list_namespaces(stores.folder)) == describe(stores.folder)["num_pages"]
    report = scrub(stores.folder, Sealer())
    assert scrub(stores.folder, Sealer()).clean, f"{report} did not take all out of use"
    assert remove(stores.folder).left_pages == 0
    assert describe(stores.folder)["num_pages"] == 0
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def other_keys(key: StorageKey) -> dict[str, StorageKey]:
    page = key.page
    return {
        "namespace": key._replace(page=page._replace(namespace=bytes(32))),
        "group": key._replace(page=page._replace(group=1)),
        "chain hash": key._replace(page=page._replace(chain_hash=bytes(32))),
        "longer chain hash": key._replace(page=page._replace(chain_hash=page.chain_hash + b"\0")),
        "shorter chain hash": key._replace(page=page._replace(chain_hash=page.chain_hash[:-1])),
        "shard": key._replace(shard=Shard(1, 2)),
        "replicated": key._replace(shard=REPLICATED),
    }


@pytest.mark.parametrize("how", [*other_keys(KEY), "longer", "shorter", "unsigned", "another secret", "flag taken off"])
def test_a_replayed_page_is_refused_and_gives_way_to_the_right_one(pages_of: Any, how: str) -> None:
    """A stranger puts pages under our key: sealed for another key, of another length, or not with our secret."""
    pages = pages_of(sealer=Sealer(SECRET))
    key, blob = pages.key(0), pages.blob(0)
    sealer = {"unsigned": Sealer(), "another secret": Sealer(OTHER_SECRET)}.get(how, pages.sealer)
    theirs = {"longer": memoryview(bytes(blob) + b"x"), "shorter": blob[:-1]}.get(how, blob)
    header = sealer.seal(other_keys(key).get(how, key), theirs)
    if how == "flag taken off":
        header = changed(header, {"flags": 0})
    relabelled = reseal(header[:32] + identity_of(key) + header[152:])
    for planted in (header, relabelled) if how in other_keys(key) else (header,):
        store = MemoryStore()
        store.put([key], [planted], [theirs])
        io = StorageIO(store, pages.sealer, num_threads=1)
        buffer = memoryview(bytearray(PAGE_BYTES))
        assert str(io.prefetch([key], [buffer]).result(20).error).startswith("1 x corrupt: ")
        assert io.persist([key], [blob]).result(20).error is None
        assert io.prefetch([key], [buffer]).result(20).error is None
        assert buffer == blob
        assert io.close()


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_with_a_sound_check_name_a_key_or_a_fault(raw: bytes) -> None:
    header = reseal(b"KVHOISTR\x01\0" + raw[10:])
    if header_fault(header) is None:
        assert identity_of(key_of(header[IDENTITY])) == header[IDENTITY]
