"""One segment file: a superblock, a table of headers, and slots of one pitch. See docs/file-format.md.

Nothing here knows what a slot holds for whom; it moves bytes and reports faults.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import struct
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import xxhash

from kvhoist.errors import StorageError
from kvhoist.storage.base import Buffer
from kvhoist.storage.file.direct import ALIGNMENT, Direct
from kvhoist.storage.file.table import OwnTable
from kvhoist.storage.file.vectored import read_all, write_all
from kvhoist.storage.record import HEADER_BYTES
from kvhoist.units import round_up

SEGMENT_VERSION = 1
SUFFIX = ".seg"
UNFINISHED_SUFFIX = ".tmp"
MAX_SLOTS = 1 << 20
MAX_PITCH_BYTES = 1 << 32  # so that no header makes anybody take more memory to check its page

_MAGIC = b"KVHOISTS"
_SUPERBLOCK = struct.Struct("<8sII16s16sQQQQQ")
_PREFIX = struct.Struct("<8sI")
_CHECK_AT = ALIGNMENT - 8
_GENERATION_AT = ALIGNMENT
_TABLE_AT = 2 * ALIGNMENT
_NO_HEADER = bytes(HEADER_BYTES)


class SegmentFault(StorageError):
    """A file that is not a usable segment of this store. `damaged`: it once was one, as far as can be told."""

    def __init__(self, reason: str, *, damaged: bool = False) -> None:
        super().__init__(reason)
        self.damaged = damaged


def pitch_of(blob_bytes: int) -> int:
    """Return the slot pitch of blobs of that length."""
    return max(ALIGNMENT, round_up(blob_bytes, ALIGNMENT))


def file_bytes_of(pitch_bytes: int, num_slots: int) -> int:
    """Return the length of a segment file."""
    return _TABLE_AT + round_up(num_slots * HEADER_BYTES, ALIGNMENT) + num_slots * pitch_bytes


def slots_that_fit(num_bytes: int, pitch_bytes: int) -> int:
    """Return how many slots of that pitch a segment file of at most `num_bytes` holds; 0 for none."""
    num_slots = max(0, num_bytes - _TABLE_AT) // (pitch_bytes + HEADER_BYTES) if pitch_bytes <= MAX_PITCH_BYTES else 0
    while num_slots and file_bytes_of(pitch_bytes, num_slots) > num_bytes:
        num_slots -= 1
    return min(num_slots, MAX_SLOTS)


class Segment:
    """An open segment file. Slot `i` has its header in the table and its blob at `i * pitch_bytes` behind the table.

    The owner keeps the table in memory and writes it, as blobs, in the way that `direct` says: a write through the page
    cache waits for all direct writes of the file and holds up the next ones. The rest goes through the page cache.
    Thread-safe as far as its callers do not write one slot at once. The file is closed by `close` alone.
    """

    def __init__(
        self, path: Path, fd: int, pitch_bytes: int, num_slots: int, direct: Direct, *, writable: bool
    ) -> None:
        self.path = path
        self.fd = fd
        self.pitch_bytes = pitch_bytes
        self.num_slots = num_slots
        self.file_bytes = file_bytes_of(pitch_bytes, num_slots)
        self._blobs_at = self.file_bytes - num_slots * pitch_bytes
        self._direct = direct
        self._direct_fd = direct.open(fd, pitch_bytes, writable=writable)
        self._own: OwnTable | None = None

    @classmethod
    def create(
        cls, folder: Path, store_id: bytes, pitch_bytes: int, num_slots: int, direct: Direct, mode: int = 0o600
    ) -> Segment:
        """Make, lock and preallocate a segment in `folder`; it appears under its name when it is whole and durable, so
        that a power cut never costs a segment. Raises OSError (ENOSPC for a full disk) and leaves nothing then."""
        segment_id = secrets.token_bytes(16)
        path = folder / (segment_id.hex() + SUFFIX)
        unfinished = path.with_suffix(UNFINISHED_SUFFIX)
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        segment = None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            segment = cls(path, fd, pitch_bytes, num_slots, direct, writable=True)
            os.posix_fallocate(fd, 0, segment.file_bytes)
            write_all(fd, [memoryview(segment._superblock(segment_id, store_id))], 0)
            segment.keep_table(b"")
            os.fsync(fd)
            os.rename(unfinished, path)
            sync_folder(folder)
        except BaseException:
            os.close(fd) if segment is None else segment.close()
            unfinished.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise
        return segment

    @classmethod
    def open(cls, path: Path, store_id: bytes, direct: Direct, *, writable: bool) -> Segment:
        """Open a segment of the store `store_id`. Raises SegmentFault where it is none, OSError where unreadable."""
        # What lies here under a segment's name may be a pipe, which would block, or lead out of the folder.
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            pitch_bytes, num_slots = _read_superblock(fd, path.stem, store_id)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, pitch_bytes, num_slots, direct, writable=writable)

    def try_lock(self) -> bool:
        """Become the owner, unless another open file is. The lock ends with the file, hence with the process."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return not self.is_unlinked()

    def unlock(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def is_unlinked(self) -> bool:
        """Tell whether the owner gave the file up; what is open of it stays readable."""
        return os.fstat(self.fd).st_nlink == 0

    def is_abandoned(self, keep_s: float) -> bool:
        """Tell whether nobody wrote to the file for `keep_s`, or the disk has no room for another one of its length."""
        disk = os.fstatvfs(self.fd)
        is_full = disk.f_bavail * disk.f_frsize < self.file_bytes
        return is_full or time.time() - os.fstat(self.fd).st_mtime > keep_s

    def slots_in_file(self) -> int:
        """Return how many slots lie wholly inside the file: fewer than `num_slots` where it was truncated."""
        return min(self.num_slots, max(0, os.fstat(self.fd).st_size - self._blobs_at) // self.pitch_bytes)

    def restore_length(self) -> None:
        """Give a truncated file its length back. Raises OSError for a full disk."""
        os.posix_fallocate(self.fd, 0, self.file_bytes)

    def read_table(self) -> bytes:
        """Return all headers, zeros where the file ends before."""
        table = bytearray(self.num_slots * HEADER_BYTES)
        read_all(self.fd, [memoryview(table)], _TABLE_AT)
        return bytes(table)

    def keep_table(self, table: bytes) -> None:
        """Keep the headers that the owner read, or none yet, in memory from now on."""
        self._own = OwnTable(table, self._blobs_at - _GENERATION_AT, self._write_own)

    def read_headers(self, slot: int, count: int) -> list[bytes]:
        """Return the headers of `count` slots from `slot` on: the owner's as they were written. Raises OSError."""
        if self._own is None:
            table = os.pread(self.fd, count * HEADER_BYTES, _TABLE_AT + slot * HEADER_BYTES)
        else:
            table = self._own.read(slot * HEADER_BYTES, count * HEADER_BYTES)
        return [table[i * HEADER_BYTES : (i + 1) * HEADER_BYTES] for i in range(count)]

    def write_headers(self, slot: int, headers: Sequence[bytes]) -> None:
        """Write the headers of neighbouring slots, then a new generation: readers in other processes see that headers
        changed. The owner's part. Raises OSError."""
        self._change(slot, headers, tells=True)

    def clear_headers(self, slots: Sequence[int]) -> None:
        """Write zeros over the headers of `slots`, ascending. Raises OSError."""
        for run in runs_of(slots):
            self._change(run[0], [_NO_HEADER] * len(run), tells=False)

    def write_blobs(self, slot: int, blobs: Sequence[Buffer]) -> None:
        """Write the blobs of neighbouring slots in one go. Raises OSError."""
        offset = self._blobs_at + slot * self.pitch_bytes
        if not self._direct.write(self._direct_fd, blobs, self.pitch_bytes, offset):
            write_all(self.fd, self._spaced(blobs), offset)

    def read_blobs(self, slot: int, buffers: Sequence[Buffer]) -> bool:
        """Fill the buffers from neighbouring slots in one go; False where the file ends before. Raises OSError."""
        offset = self._blobs_at + slot * self.pitch_bytes
        done = self._direct.read(self._direct_fd, buffers, self.pitch_bytes, offset)
        return done or read_all(self.fd, self._spaced(buffers), offset)

    def generation(self) -> int:
        """Return what changes when headers were written. Raises OSError."""
        return int.from_bytes(os.pread(self.fd, 8, _GENERATION_AT), "little")

    def sync(self) -> None:
        """Make all that was written durable. Raises OSError."""
        os.fdatasync(self.fd)

    def close(self) -> None:
        os.close(self.fd)
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def _change(self, slot: int, headers: Sequence[bytes], *, tells: bool) -> None:
        assert self._own is not None, "only the owner writes"
        self._own.write(b"".join(headers), slot * HEADER_BYTES, tells=tells)

    def _write_own(self, blocks: Buffer, offset: int) -> None:
        if not self._direct.write(self._direct_fd, [blocks], len(blocks), _GENERATION_AT + offset):
            write_all(self.fd, [blocks], _GENERATION_AT + offset)

    def _spaced(self, blobs: Sequence[Buffer]) -> list[Buffer]:
        """Put what is between the end of each blob and the next slot between the blobs."""
        if all(len(blob) == self.pitch_bytes for blob in blobs[:-1]):
            return list(blobs)
        spare = memoryview(bytearray(self.pitch_bytes))
        parts = [part for blob in blobs for part in (blob, spare[: self.pitch_bytes - len(blob)])]
        return [part for part in parts[:-1] if len(part)]

    def _superblock(self, segment_id: bytes, store_id: bytes) -> bytes:
        fixed = _SUPERBLOCK.pack(
            _MAGIC,
            SEGMENT_VERSION,
            HEADER_BYTES,
            segment_id,
            store_id,
            self.pitch_bytes,
            self.num_slots,
            _TABLE_AT,
            self._blobs_at,
            int(time.time() * 1000),
        )
        body = fixed.ljust(_CHECK_AT, b"\0")
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def runs_of(slots: Sequence[int]) -> list[Sequence[int]]:
    """Cut ascending slots where one is not the next of the one before (the same slot twice makes two runs)."""
    cuts = [i for i, (a, b) in enumerate(pairwise(slots), 1) if b != a + 1]
    return [slots[a:b] for a, b in pairwise([0, *cuts, len(slots)])] if slots else []


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_no_space(error: OSError) -> bool:
    """Tell whether an error means that there is no room, rather than that something is broken."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _read_superblock(fd: int, stem: str, store_id: bytes) -> tuple[int, int]:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise SegmentFault("no regular file")
    if len(block := os.pread(fd, ALIGNMENT, 0)) < ALIGNMENT:
        raise SegmentFault("truncated inside of its superblock", damaged=True)
    magic, version = _PREFIX.unpack_from(block)
    if magic != _MAGIC:
        raise SegmentFault("not a kvhoist segment: its first bytes are others", damaged=not any(block))
    if version != SEGMENT_VERSION:
        raise SegmentFault(f"segment version {version}, this kvhoist reads version {SEGMENT_VERSION}")
    if xxhash.xxh3_64_intdigest(block[:_CHECK_AT]) != int.from_bytes(block[_CHECK_AT:], "little"):
        raise SegmentFault("superblock damaged: its check differs", damaged=True)
    _, _, _, segment_id, owner_id, pitch_bytes, num_slots, table_at, blobs_at, _ = _SUPERBLOCK.unpack_from(block)
    if owner_id != store_id:
        raise SegmentFault("belongs to another store: was it copied here from another folder?")
    if segment_id.hex() != stem:
        raise SegmentFault("a copy of another segment: its name is not its id")
    fits = 0 < pitch_bytes <= MAX_PITCH_BYTES and pitch_bytes % ALIGNMENT == 0 and 0 < num_slots <= MAX_SLOTS
    if not fits or (table_at, blobs_at) != (_TABLE_AT, file_bytes_of(pitch_bytes, num_slots) - num_slots * pitch_bytes):
        raise SegmentFault(f"an impossible shape: {num_slots} slots of {pitch_bytes} bytes from {blobs_at} on")
    if status.st_size < blobs_at:  # neither memory nor time is spent on slots that a few bytes only speak of
        raise SegmentFault("truncated inside of its table", damaged=True)
    return pitch_bytes, num_slots
