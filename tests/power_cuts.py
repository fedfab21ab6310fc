"""What a disk may hold after a power cut: a record of what a store does to its files, and images made from it.

The model: a write reaches the disk in sectors, any of them, in any order, unless a sync of its file came after; names
in a folder reach it in their order, some of them, unless a sync of the folder came after them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True)
class Op:
    """`kind`: create, allocate, write, sync, rename, unlink, sync_folder, or mark (what the test knows there)."""

    kind: str
    file: int = -1
    name: str = ""
    offset: int = 0
    data: bytes = b""
    known: Any = None


class Recorder:
    """Records what this process does to the segment files below `folder`, in order, while it does it."""

    def __init__(self, folder: Path) -> None:
        self.ops: list[Op] = []
        self._prefix = str(folder / "segments") + os.sep
        self._folder = str(folder / "segments")
        self._files: dict[int, int] = {}
        self._num_files = 0

    def mark(self, known: Any) -> None:
        self.ops.append(Op("mark", known=known))

    @contextmanager
    def recording(self) -> Iterator[None]:
        real = {
            name: getattr(os, name)
            for name in ("open", "pwritev", "posix_fallocate", "fsync", "fdatasync", "rename", "unlink")
        }

        def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
            fd: int = real["open"](path, flags, *args, **options)
            if flags & os.O_CREAT and self._is_segment(path):
                self._files[os.fstat(fd).st_ino] = self._num_files
                self.ops.append(Op("create", self._num_files, Path(path).name))
                self._num_files += 1
            return fd

        def pwritev(fd: int, buffers: Any, offset: int) -> int:
            done: int = real["pwritev"](fd, buffers, offset)
            self._wrote(fd, b"".join(map(bytes, buffers))[:done], offset)
            return done

        def allocated(fd: int, offset: int, length: int) -> None:
            real["posix_fallocate"](fd, offset, length)
            self.ops.append(Op("allocate", self._file_of(fd), offset=offset + length))

        def synced(name: str, fd: int) -> None:
            real[name](fd)
            if os.readlink(f"/proc/self/fd/{fd}") == self._folder:
                self.ops.append(Op("sync_folder"))
            elif (file := self._file_of(fd)) >= 0:
                self.ops.append(Op("sync", file))

        def renamed(source: Any, target: Any, **options: Any) -> None:
            real["rename"](source, target, **options)
            if self._is_segment(target):
                self.ops.append(Op("rename", name=Path(target).name, known=Path(source).name))

        def unlinked(path: Any, **options: Any) -> None:
            real["unlink"](path, **options)
            if self._is_segment(path):
                self.ops.append(Op("unlink", name=Path(path).name))

        fakes = {"open": opened, "pwritev": pwritev, "posix_fallocate": allocated}
        fakes |= {"rename": renamed, "unlink": unlinked}
        fakes |= {name: lambda fd, name=name: synced(name, fd) for name in ("fsync", "fdatasync")}
        with patch.multiple(os, **fakes):
            yield

    def _is_segment(self, path: Any) -> bool:
        return str(path).startswith(self._prefix) and str(path).endswith((".seg", ".tmp"))

    def _file_of(self, fd: int) -> int:
        return self._files.get(os.fstat(fd).st_ino, -1)

    def _wrote(self, fd: int, data: bytes, offset: int) -> None:
        if (file := self._file_of(fd)) >= 0:
            self.ops.append(Op("write", file, offset=offset, data=data))


@dataclass
class _File:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[Op] = field(default_factory=list)


class Disk:
    """The disk at a point of a recording: what it holds for sure, and what may have reached it."""

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._names: dict[str, int] = {}
        self._pending: list[Op] = []

    def apply(self, op: Op) -> None:
        if op.kind == "create":
            self._files[op.file] = _File()
        if op.kind in ("create", "rename", "unlink"):
            self._pending.append(op)
        elif op.kind in ("allocate", "write"):
            self._files[op.file].pending.append(op)
        elif op.kind == "sync":
            file = self._files[op.file]
            for write in file.pending:
                _write(file.durable, write, 0, len(write.data))
            file.pending.clear()
        elif op.kind == "sync_folder":
            for name in self._pending:
                _rename(self._names, name)
            self._pending.clear()

    def image(self, rng: random.Random) -> dict[str, bytearray]:
        """Return the files by name as a power cut at this point may leave them."""
        how = rng.choice(["all", "none", "some", "some", "few", "most", "last torn"])
        names = dict(self._names)
        kept = {"all": len(self._pending), "none": 0}.get(how, rng.randint(0, len(self._pending)))
        for op in self._pending[:kept]:
            _rename(names, op)
        return {name: self._content(self._files[file], how, rng) for name, file in names.items()}

    def _content(self, file: _File, how: str, rng: random.Random) -> bytearray:
        content = bytearray(file.durable)
        share = {"all": 1.0, "none": 0.0, "few": 0.1, "most": 0.9, "last torn": 1.0}.get(how, rng.random())
        sector = rng.choice([512, 4096])
        writes = list(file.pending)
        if how not in ("all", "last torn"):
            rng.shuffle(writes)
        for write in writes:
            last = how == "last torn" and write is writes[-1]
            cuts = [*range(-write.offset % sector or sector, len(write.data), sector), len(write.data)]
            for begin, end in zip([0, *cuts], cuts, strict=False):
                if rng.random() < (0.5 if last else share):
                    _write(content, write, begin, end)
        return content


def _write(content: bytearray, op: Op, begin: int, end: int) -> None:
    data = op.data[begin:end]
    at = op.offset + (begin if op.kind == "write" else 0)
    if len(content) < at + len(data):
        content.extend(bytes(at + len(data) - len(content)))
    content[at : at + len(data)] = data


def _rename(names: dict[str, int], op: Op) -> None:
    if op.kind == "create":
        names[op.name] = op.file
    elif op.kind == "unlink":
        names.pop(op.name, None)
    elif op.known in names:
        names[op.name] = names.pop(op.known)
