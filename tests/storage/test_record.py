from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvhoist.errors import ConfigError
from kvhoist.messages import REPLICATED, WHOLE, PageKey, Shard, StorageKey
from kvhoist.storage.record import HEADER_BYTES, IDENTITY, Sealer, header_fault, identity_of, key_of, read_header

KEYS = st.builds(
    StorageKey,
    st.builds(
        PageKey, st.binary(min_size=32, max_size=32), st.integers(0, 2**32 - 1), st.binary(min_size=1, max_size=64)
    ),
    st.builds(Shard, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
)
KEY = StorageKey(PageKey(bytes(32), 1, bytes(range(32))), Shard(1, 4))
BLOB = memoryview(bytes(range(256)) * 20)


def reseal(header: bytes) -> bytes:
    """Give a header that was tampered with a sound check of its own."""
    return header[:-8] + xxhash.xxh3_64_intdigest(header[:-8]).to_bytes(8, "little")


@given(KEYS, st.binary(max_size=300), st.none() | st.binary(min_size=1, max_size=100))
def test_what_was_sealed_passes_the_check_and_says_what(key: StorageKey, blob: bytes, secret: bytes | None) -> None:
    header = Sealer(secret, clock=lambda: 1234.5).seal(key, memoryview(blob))
    assert len(header) == HEADER_BYTES
    assert Sealer(secret).check(key, header, memoryview(blob)) is None
    read = read_header(header)
    assert read is not None
    assert (read.key, read.blob_bytes, read.written_at, read.signed) == (key, len(blob), 1234.5, secret is not None)


@given(KEYS, KEYS)
def test_identities_are_equal_exactly_where_keys_are(a: StorageKey, b: StorageKey) -> None:
    assert key_of(identity_of(a)) == a
    assert (identity_of(a) == identity_of(b)) == (a == b)


def test_a_chain_hash_that_ends_in_zeros_is_not_the_shorter_one() -> None:
    def key(chain_hash: bytes) -> StorageKey:
        return StorageKey(PageKey(bytes(32), 0, chain_hash), WHOLE)

    assert identity_of(key(b"ab")) != identity_of(key(b"ab\0"))
    assert Sealer().check(key(b"ab\0"), Sealer().seal(key(b"ab"), BLOB), BLOB) is not None


@pytest.mark.parametrize("secret", [None, b"secret"])
def test_every_flipped_bit_of_a_header_is_caught(secret: bytes | None) -> None:
    sealer = Sealer(secret)
    header = sealer.seal(KEY, BLOB)
    for bit in range(HEADER_BYTES * 8):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        assert sealer.check(KEY, bytes(flipped), BLOB) is not None, f"bit {bit}"


@pytest.mark.parametrize("secret", [None, b"secret"])
def test_flipped_bits_of_a_blob_are_caught(secret: bytes | None) -> None:
    sealer = Sealer(secret)
    header = sealer.seal(KEY, BLOB)
    for bit in range(0, len(BLOB) * 8, 97):
        flipped = bytearray(BLOB)
        flipped[bit // 8] ^= 1 << bit % 8
        assert "blob damaged" in str(sealer.check(KEY, header, memoryview(flipped)))


OTHERS = {
    "namespace": KEY._replace(page=KEY.page._replace(namespace=bytes([1]) * 32)),
    "cache group": KEY._replace(page=KEY.page._replace(group=2)),
    "chain hash": KEY._replace(page=KEY.page._replace(chain_hash=bytes(32))),
    "shard": KEY._replace(shard=REPLICATED),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_record_of_another_key_is_refused_and_says_what_differs(name: str) -> None:
    header = Sealer().seal(OTHERS[name], BLOB)
    assert Sealer().check(KEY, header, BLOB) == f"misplaced: the record is of another {name}"


def test_each_fault_has_its_own_plain_reason() -> None:
    plain, signing = Sealer(), Sealer(b"secret")
    header = plain.seal(KEY, BLOB)
    version = reseal(header[:8] + struct.pack("<H", 2) + header[10:])
    reasons = {
        "no record here": plain.check(KEY, bytes(256), BLOB),
        "header truncated: 100 of 256": plain.check(KEY, header[:100], BLOB),
        "foreign bytes": plain.check(KEY, b"x" * 256, BLOB),
        "record version 2, this kvhoist reads version 1": plain.check(KEY, version, BLOB),
        "header damaged": plain.check(KEY, header[:100] + bytes(156), BLOB),
        "length differs: record of 5120 bytes, expected 5119": plain.check(KEY, header, BLOB[:-1]),
        "unsigned record": signing.check(KEY, header, BLOB),
        "another secret": signing.check(KEY, Sealer(b"other").seal(KEY, BLOB), BLOB),
    }
    for expected, reason in reasons.items():
        assert reason is not None
        assert expected in reason
    assert len({str(reason) for reason in reasons.values()}) == len(reasons)


def test_a_forged_signature_with_sound_checksums_is_refused() -> None:
    header = Sealer(b"secret").seal(KEY, BLOB)
    forged = reseal(header[:168] + bytes(32) + header[200:])
    assert header_fault(forged) is None
    assert "signature differs" in str(Sealer(b"secret").check(KEY, forged, BLOB))


def test_a_replaced_blob_with_sound_checksums_is_refused_by_the_signature() -> None:
    secret = Sealer(b"secret")
    other = memoryview(bytes(len(BLOB)))
    header = secret.seal(KEY, BLOB)
    forged = reseal(header[:152] + xxhash.xxh3_128_digest(other) + header[168:])
    assert Sealer().check(KEY, forged, other) is None
    assert "signature differs" in str(secret.check(KEY, forged, other))


def test_without_the_secret_a_signed_record_is_judged_by_its_checksums() -> None:
    header = Sealer(b"secret").seal(KEY, BLOB)
    assert Sealer().check(KEY, header, BLOB) is None
    assert Sealer().check(KEY, header, BLOB[:-1]) is not None


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one byte"):
        Sealer(b"")


@pytest.mark.parametrize(
    "key",
    [
        KEY._replace(page=KEY.page._replace(namespace=b"short")),
        KEY._replace(page=KEY.page._replace(chain_hash=b"")),
        KEY._replace(page=KEY.page._replace(chain_hash=bytes(65))),
        KEY._replace(page=KEY.page._replace(group=-1)),
        KEY._replace(page=KEY.page._replace(group=2**32)),
        KEY._replace(shard=Shard(-1, 2)),
    ],
)
def test_a_key_that_no_header_can_hold_is_refused(key: StorageKey) -> None:
    with pytest.raises(ConfigError, match="storage key"):
        Sealer().seal(key, BLOB)


def test_the_header_has_the_layout_of_the_file_format() -> None:
    header = Sealer(clock=lambda: 2.0).seal(KEY, BLOB)
    assert header[:8] == b"KVHOISTR"
    assert struct.unpack_from("<HHIQQ", header, 8) == (1, 0, 256, len(BLOB), 2000)
    assert header[IDENTITY] == identity_of(KEY)
    assert header[32:64] == KEY.page.namespace
    assert struct.unpack_from("<3IB", header, 64) == (1, 1, 4, 32)
    assert header[88:120] == KEY.page.chain_hash
    assert header[152:168] == xxhash.xxh3_128_digest(BLOB)
    assert header[168:248] == bytes(80)
    assert header[248:] == xxhash.xxh3_64_intdigest(header[:248]).to_bytes(8, "little")
