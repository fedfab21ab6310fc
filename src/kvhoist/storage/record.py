"""The record header: 256 bytes that bind a blob to its storage key, length and checksum. See docs/file-format.md.

offset bytes  field (all integers little-endian, all spare bytes zero)
     0     8  magic "KVHOISTR"
     8     2  record version
    10     2  flags: bit 0 = signed
    12     4  header length, 256
    16     8  blob length in bytes
    24     8  written at, milliseconds since 1970
    32   120  identity: namespace digest 32, group 4, shard rank 4, shard ranks 4, chain hash length 1, zero 11,
              chain hash 64 (zero-padded)
   152    16  XXH3-128 of the blob
   168    32  keyed BLAKE2b-256 of bytes 0..167 and the blob, or zero
   200    48  zero
   248     8  XXH3-64 of bytes 0..247
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from kvhoist.checksum import checksum
from kvhoist.errors import ConfigError
from kvhoist.messages import PageKey, Shard, StorageKey
from kvhoist.storage.base import Buffer

HEADER_BYTES = 256
RECORD_VERSION = 1
MAX_CHAIN_HASH_BYTES = 64
IDENTITY = slice(32, 152)
"""Where a header holds `identity_of(key)`."""

_MAGIC = b"KVHOISTR"
_SIGNED = 1
_IDENTITY = struct.Struct("<32s3IB11x64s")
_FIXED = struct.Struct("<8sHHIQQ120s16s")
_PREFIX = struct.Struct("<8sH")
_SHAPE = struct.Struct("<HI")
_CHECK_AT = HEADER_BYTES - 8
_MAC = slice(_FIXED.size, _FIXED.size + 32)
_NO_MAC = bytes(32)
_NAMESPACE_BYTES = 32
_LENGTH_AT = 44
_CHAIN_HASH_AT = _IDENTITY.size - MAX_CHAIN_HASH_BYTES


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a sound header says. `written_at` is in seconds since 1970."""

    key: StorageKey
    blob_bytes: int
    written_at: float
    signed: bool


def identity_of(key: StorageKey) -> bytes:
    """Return the 120 bytes that stand for `key` in a header: equal exactly where the keys are.

    Raises ConfigError for a key that a header cannot hold.
    """
    namespace, group, chain_hash = key.page
    rank, num_ranks = key.shard
    length = len(chain_hash)
    if len(namespace) != _NAMESPACE_BYTES or not 0 < length <= MAX_CHAIN_HASH_BYTES:
        raise _unusable(key)
    try:
        return _IDENTITY.pack(namespace, group, rank, num_ranks, length, chain_hash)
    except struct.error as error:
        raise _unusable(key) from error


def own_identity(key: StorageKey, header: bytes) -> bytes:
    """Return the identity of a key whose header this is. Raises ConfigError for another's."""
    identity = identity_of(key)
    if len(header) != HEADER_BYTES or header[IDENTITY] != identity:
        raise ConfigError(f"the header of {key} is not its own", expected=f"{HEADER_BYTES} bytes made by Sealer.seal")
    return identity


def key_of(identity: bytes) -> StorageKey:
    """Return the key that `identity_of` packed."""
    namespace, group, rank, num_ranks, length, chain_hash = _IDENTITY.unpack(identity)
    return StorageKey(PageKey(namespace, group, chain_hash[:length]), Shard(rank, num_ranks))


def _is_identity(packed: bytes) -> bool:
    """Tell whether `identity_of` can have packed these bytes."""
    length = packed[_LENGTH_AT]
    spare = packed[_LENGTH_AT + 1 : _CHAIN_HASH_AT], packed[_CHAIN_HASH_AT + length :]
    return 0 < length <= MAX_CHAIN_HASH_BYTES and not any(map(any, spare))


def namespace_of(identity: bytes) -> bytes:
    """Return the namespace digest inside `identity_of(key)`."""
    return identity[:_NAMESPACE_BYTES]


def header_fault(header: bytes) -> str | None:
    """Return why `header` is not a sound header of this version, or None. Says nothing about any blob."""
    if len(header) != HEADER_BYTES:
        return f"header truncated: {len(header)} of {HEADER_BYTES} bytes"
    magic, version = _PREFIX.unpack_from(header)
    if magic != _MAGIC:
        return "no record here: header empty" if not any(header) else "foreign bytes: not a kvhoist record header"
    if version != RECORD_VERSION:
        return f"record version {version}, this kvhoist reads version {RECORD_VERSION}"
    if xxhash.xxh3_64_intdigest(header[:_CHECK_AT]) != int.from_bytes(header[_CHECK_AT:], "little"):
        return "header damaged: its own check differs (torn write or flipped bit)"
    flags, header_bytes = _SHAPE.unpack_from(header, _PREFIX.size)
    if flags & ~_SIGNED or header_bytes != HEADER_BYTES or not _is_identity(header[IDENTITY]):
        return "header impossible: flags, length or key that this version does not write"
    return None


def read_header(header: bytes) -> RecordHeader | None:
    """Return what a sound header says, or None where `header_fault` names a fault."""
    if header_fault(header) is not None:
        return None
    _, _, flags, _, blob_bytes, written_at, identity, _ = _FIXED.unpack_from(header)
    return RecordHeader(key_of(identity), blob_bytes, written_at / 1000, bool(flags & _SIGNED))


def blob_bytes_of(header: bytes) -> int:
    """Return the blob length that a sound header states."""
    return int.from_bytes(header[16:24], "little")


def is_blob_of(header: bytes, blob: Buffer) -> bool:
    """Tell whether a sound header's checksum is that of `blob`. Proves no signature: that is `Sealer.check`."""
    return len(blob) == blob_bytes_of(header) and checksum(blob) == header[152:168]


def written_at_of(header: bytes) -> int:
    """Return when the record of a sound header was written, in milliseconds since 1970."""
    return int.from_bytes(header[24:32], "little")


class Sealer:
    """Makes headers at persist and checks them at prefetch. Thread-safe; holds no state but the derived key.

    With a `secret` (any non-empty bytes) headers carry a keyed BLAKE2b, and a record without one, or with one made with
    another secret, is refused. Without a secret a signed record is judged by its checksums alone, since its signature
    cannot be verified. `clock` gives seconds since 1970 (it enters the header for `store ls`, nothing else).

    A BLAKE2b costs far more than XXH3 (about 0.6 against 30 GB/s on one core), which is why it is by choice.
    """

    def __init__(self, secret: bytes | None = None, *, clock: Callable[[], float] = time.time) -> None:
        if secret is not None and not secret:
            raise ConfigError(
                "an empty store secret protects nothing",
                expected="at least one byte, or None for checksums only",
                remedy="Set a random secret of 32 bytes, the same in all processes that share the store.",
            )
        self._mac_key = (
            None if secret is None else hashlib.blake2b(secret, digest_size=32, person=b"kvhoist-record").digest()
        )
        self._clock = clock

    @property
    def signs(self) -> bool:
        """Whether headers are signed and unsigned ones refused."""
        return self._mac_key is not None

    def seal(self, key: StorageKey, blob: Buffer) -> bytes:
        """Return the header of `blob` under `key`. Raises ConfigError for a key that a header cannot hold."""
        signed = self._mac_key is not None
        fixed = _FIXED.pack(
            _MAGIC,
            RECORD_VERSION,
            _SIGNED if signed else 0,
            HEADER_BYTES,
            len(blob),
            int(self._clock() * 1000),
            identity_of(key),
            checksum(blob),
        )
        body = (fixed + self._mac(fixed, blob)).ljust(_CHECK_AT, b"\0")
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")

    def check(self, key: StorageKey, header: bytes, blob: Buffer) -> str | None:
        """Return None where `header` proves `blob` to be the bytes sealed under `key`, else why not, for people."""
        fault = header_fault(header)
        if fault is not None:
            return fault
        _, _, flags, _, blob_bytes, _, identity, stated = _FIXED.unpack_from(header)
        if identity != identity_of(key):
            return _misplaced(key, key_of(identity))
        if blob_bytes != len(blob):
            return f"length differs: record of {blob_bytes} bytes, expected {len(blob)}"
        signed = bool(flags & _SIGNED)
        if self._mac_key is not None and not signed:
            return "unsigned record, but this store has a secret"
        if checksum(blob) != stated:
            return "blob damaged: its XXH3-128 differs (torn write or flipped bit)"
        if self._mac_key is None:
            return None
        same = hmac.compare_digest(self._mac(header[: _FIXED.size], blob), header[_MAC])
        return None if same else "signature differs: written with another secret, or forged"

    def _mac(self, fixed: bytes, blob: Buffer) -> bytes:
        if self._mac_key is None:
            return _NO_MAC
        digest = hashlib.blake2b(fixed, key=self._mac_key, digest_size=32)
        digest.update(blob)
        return digest.digest()


def _misplaced(wanted: StorageKey, found: StorageKey) -> str:
    names = ("namespace", "cache group", "chain hash", "shard")
    pairs = zip(names, (*wanted.page, wanted.shard), (*found.page, found.shard), strict=True)
    return "misplaced: the record is of another " + " and ".join(name for name, a, b in pairs if a != b)


def _unusable(key: StorageKey) -> ConfigError:
    page = key.page
    return ConfigError(
        "a storage key that a record header cannot hold",
        got=f"namespace of {len(page.namespace)} bytes, chain hash of {len(page.chain_hash)} bytes, "
        f"group {page.group}, shard {tuple(key.shard)}",
        expected=f"namespace of {_NAMESPACE_BYTES} bytes, chain hash of 1 to {MAX_CHAIN_HASH_BYTES} bytes, "
        "group, rank and ranks below 2**32",
    )
