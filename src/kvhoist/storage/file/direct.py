"""O_DIRECT: pages between memory and disk without the page cache, and without a copy where they lie aligned.

Whether a file system can do it is found out by trying; whatever it refuses is done through the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import queue
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvhoist.errors import ConfigError, StoreUnavailableError
from kvhoist.private_memory import private_memory
from kvhoist.storage.base import Buffer, address_of
from kvhoist.storage.file.vectored import MAX_BUFFERS, move
from kvhoist.units import round_up

ALIGNMENT = 4096
"""The unit of O_DIRECT: of addresses, lengths and offsets."""

DIRECT_MODES = ("auto", "on", "off")
DIRECT_FROM_BYTES = 128 << 10
"""Of what pitch on `auto` goes past the page cache: smaller pages are written 1.5 to 2.5 times as fast through it, and
most of them read faster (docs/results/2026-11-30-storage-direct.json)."""

_BOUNCE_BYTES = 1 << 20
_NUM_BOUNCES = 4
# EFAULT: memory that a driver mapped, which the disk cannot reach but the processor can.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT)

_log = logging.getLogger(__name__)


class Piece(NamedTuple):
    """Bytes at `offset`, which is an aligned one. `bounce_at`: where in a bounce buffer they pass through, or None for
    bytes that lie aligned themselves."""

    offset: int
    view: Buffer
    bounce_at: int | None


class Direct:
    """How one store reaches its blobs: `active` while O_DIRECT is used. Thread-safe.

    At most 4 bounce buffers of 1 MiB are made, once each, when blobs come that do not lie aligned; a thread that finds
    none free waits for one. Where the file system refuses in the middle of work, which `on` cannot rule out, one line
    in the log says so and everything goes through the page cache from then on.
    """

    def __init__(self, folder: Path, mode: str, *, format_file: str) -> None:
        """Try it in `folder`, or where that is to be made; nothing is left behind there.

        Raises ConfigError for an unknown mode, StoreUnavailableError for `on` where it cannot be.
        """
        if mode not in DIRECT_MODES:
            raise ConfigError("an unknown way to reach the disk", got=f"direct={mode!r}", choices=DIRECT_MODES)
        refusal = None if mode == "off" else _refusal(folder, folder / format_file)
        if refusal is not None and mode == "on":
            raise StoreUnavailableError(
                f"no O_DIRECT on the file system of {folder}",
                got=refusal.strerror,
                remedy="Give a folder on a local disk, or set direct=auto to go through the page cache.",
            )
        self.active = mode != "off" and refusal is None
        self._from_bytes = 0 if mode == "on" else DIRECT_FROM_BYTES
        if refusal is not None:
            _log.warning("%s goes through the page cache: no O_DIRECT here (%s)", folder, refusal.strerror)
        self._bounces: queue.LifoQueue[mmap.mmap | None] = queue.LifoQueue()
        for _ in range(_NUM_BOUNCES):
            self._bounces.put(None)

    def open(self, fd: int, pitch_bytes: int, *, writable: bool) -> int | None:
        """Open the file of `fd` once more, for blobs of that pitch; None where they go through the page cache."""
        if not self.active or pitch_bytes < self._from_bytes:
            return None
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_DIRECT | os.O_CLOEXEC
        try:
            return os.open(f"/proc/self/fd/{fd}", flags)
        except OSError as error:
            self._give_up(error)
            return None

    def write(self, fd: int | None, blobs: Sequence[Buffer], pitch_bytes: int, offset: int) -> bool:
        """Write blobs `pitch_bytes` apart from `offset` on, padded with zeros to whole units, to what `open` returned.
        False: not all were written, and the page cache must do it. Raises OSError."""
        return self._move(os.pwritev, fd, blobs, pitch_bytes, offset)

    def read(self, fd: int | None, blobs: Sequence[Buffer], pitch_bytes: int, offset: int) -> bool:
        """Fill the blobs; False as `write`, and where the file ends before. Raises OSError."""
        return self._move(os.preadv, fd, blobs, pitch_bytes, offset)

    def _move(
        self,
        call: Callable[[int, list[Buffer], int], int],
        fd: int | None,
        blobs: Sequence[Buffer],
        pitch_bytes: int,
        offset: int,
    ) -> bool:
        if fd is None or not self.active:
            return False
        calls = plan_calls(blobs, pitch_bytes, _BOUNCE_BYTES)
        bounces = any(piece.bounce_at is not None for pieces in calls for piece in pieces)
        with self._bounce() if bounces else contextlib.nullcontext(memoryview(b"")) as bounce:
            for pieces in calls:
                buffers = [_buffer_of(piece, bounce) for piece in pieces]
                if call is os.pwritev:
                    _fill(pieces, buffers)
                try:
                    moved = move(call, fd, buffers, offset + pieces[0].offset, ALIGNMENT)
                except OSError as error:
                    if error.errno not in _REFUSALS:
                        raise
                    self._give_up(error)
                    return False
                if moved < sum(map(len, buffers)):
                    return False
                if call is os.preadv:
                    _empty(pieces, buffers)
        return True

    @contextlib.contextmanager
    def _bounce(self) -> Iterator[Buffer]:
        bounce = self._bounces.get()
        try:
            bounce = bounce or private_memory(_BOUNCE_BYTES)
            yield memoryview(bounce)
        finally:
            self._bounces.put(bounce)

    def _give_up(self, error: OSError) -> None:
        if self.active:
            self.active = False
            _log.warning("the file system refuses O_DIRECT (%s): through the page cache from now on", error)


def plan_calls(blobs: Sequence[Buffer], pitch_bytes: int, bounce_bytes: int) -> list[list[Piece]]:
    """Cut blobs that lie `pitch_bytes` apart on disk into calls, each of pieces that follow one another there without
    a gap, at most MAX_BUFFERS, of which at most `bounce_bytes` pass through a bounce buffer."""
    calls: list[list[Piece]] = []
    end = used = 0
    for offset, view, aligned in _cut(blobs, pitch_bytes, bounce_bytes):
        num_bytes = round_up(len(view), ALIGNMENT)
        bounced = 0 if aligned else num_bytes
        if not calls or offset != end or used + bounced > bounce_bytes or len(calls[-1]) == MAX_BUFFERS:
            calls.append([])
            used = 0
        calls[-1].append(Piece(offset, view, None if aligned else used))
        used += bounced
        end = offset + num_bytes
    return calls


def _cut(blobs: Sequence[Buffer], pitch_bytes: int, bounce_bytes: int) -> Iterator[tuple[int, Buffer, bool]]:
    for number, blob in enumerate(blobs):
        at = number * pitch_bytes
        aligned = len(blob) - len(blob) % ALIGNMENT if len(blob) and address_of(blob) % ALIGNMENT == 0 else 0
        if aligned:
            yield at, blob[:aligned], True
        for begin in range(aligned, len(blob), bounce_bytes):
            yield at + begin, blob[begin : begin + bounce_bytes], False


def _buffer_of(piece: Piece, bounce: Buffer) -> Buffer:
    if piece.bounce_at is None:
        return piece.view
    return bounce[piece.bounce_at : piece.bounce_at + round_up(len(piece.view), ALIGNMENT)]


def _fill(pieces: Sequence[Piece], buffers: Sequence[Buffer]) -> None:
    for piece, buffer in zip(pieces, buffers, strict=True):
        if piece.bounce_at is not None:
            buffer[: len(piece.view)] = piece.view
            buffer[len(piece.view) :] = bytes(len(buffer) - len(piece.view))


def _empty(pieces: Sequence[Piece], buffers: Sequence[Buffer]) -> None:
    for piece, buffer in zip(pieces, buffers, strict=True):
        if piece.bounce_at is not None:
            piece.view[:] = buffer[: len(piece.view)]


def _refusal(folder: Path, format_file: Path) -> OSError | None:
    """Return with what the file system refuses O_DIRECT, by reading a store's file, or writing one that has no name."""
    with private_memory(ALIGNMENT) as block:
        try:
            if format_file.is_file():
                fd = os.open(format_file, os.O_RDONLY | os.O_DIRECT)
                try:
                    os.preadv(fd, [block], 0)
                finally:
                    os.close(fd)
            else:
                place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
                with tempfile.TemporaryFile(dir=place) as file:
                    fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_DIRECT)
                    try:
                        os.pwritev(fd, [block], 0)
                    finally:
                        os.close(fd)
        except OSError as error:
            # Of a folder that cannot be written the store itself tells; what this says of it is nothing.
            return error if error.errno in _REFUSALS else None
    return None
