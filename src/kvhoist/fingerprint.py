"""Which weights these are, from samples: of a checkpoint's files, or of tensors in memory.

Both read names, dtypes, shapes and lengths of all, and blocks of 4 KiB of every tensor: the first, the last, and evenly
between, up to 16 a tensor and about 64 MiB in all. So another checkpoint, a fine-tune, a merge, a requantization, a
resized or renamed tensor gives another fingerprint, in a second for 150 GB. What it cannot see is an edit that lies
wholly between the samples, such as a few patched rows of an embedding: name such weights yourself by `weights_id`,
which overrides the fingerprint wherever one is taken. The two kinds differ for the same weights: choose one and stay.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from operator import index as as_index
from pathlib import Path
from typing import Any

import numpy as np

from kvhoist.affinity import on_any_core
from kvhoist.errors import ConfigError

BLOCK_BYTES = 4096
_MAX_BLOCKS_A_TENSOR = 16
_BUDGET_BLOCKS = 16384
_NUM_THREADS = 16
_READS_A_TASK = 256
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
_SAFETENSORS = (".safetensors",)
_OPAQUE = (".gguf", ".bin", ".pt", ".pth")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state.pth")
_REMEDY = "Give the folder or file that holds the weights, or pass weights_id and take no fingerprint."


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a file that are sampled as one: a tensor, or a file whose format is not read."""

    file: int
    offset_bytes: int
    num_bytes: int


def sample_offsets(num_bytes: int, num_blocks: int) -> list[int]:
    """Return where the sampled blocks of `num_bytes` begin: all of them where `num_blocks` cover it."""
    if num_bytes <= num_blocks * BLOCK_BYTES:
        return list(range(0, num_bytes, BLOCK_BYTES))
    if num_blocks == 1:
        # The middle: first rows (padding, special tokens) are the likeliest to be alike in two sets of weights.
        return [num_bytes // 2 - BLOCK_BYTES // 2]
    return [i * (num_bytes - BLOCK_BYTES) // (num_blocks - 1) for i in range(num_blocks)]


def fingerprint_checkpoint(path: str | os.PathLike[str]) -> str:
    """Return the fingerprint of a checkpoint: a folder, or one file (.safetensors, .gguf, .bin, .pt, .pth).

    Covers the names and lengths of the weight files, index files, safetensors headers and the sampled blocks. Config
    and tokenizer are not weights. Raises ConfigError for a path that is missing, unreadable, truncated or holds none.
    """
    root = Path(path)
    try:
        files = _weight_files(root)
        with ExitStack() as stack:
            fds = [_open(stack, file) for file in files]
            digest = sha256(b"kvhoist checkpoint v1\n")
            for text in _index_texts(root, files):
                digest.update(text)
            spans = []
            for number, (file, fd) in enumerate(zip(files, fds, strict=True)):
                header, found = _spans(file, number, fd)
                spans += found
                digest.update(json.dumps([file.name, os.fstat(fd).st_size, sha256(header).hexdigest()]).encode())
            for sampled in _sample_files(fds, spans):
                digest.update(sampled)
    except OSError as error:
        raise ConfigError(
            "the checkpoint cannot be read", got=f"{error.filename or root}: {error.strerror}", remedy=_REMEDY
        ) from error
    return f"checkpoint-v1:{digest.hexdigest()}"


def fingerprint_tensors(tensors: Mapping[str, Any]) -> str:
    """Return the fingerprint of weights in memory: names → numpy arrays or torch tensors of any dtype and device.

    Independent of the mapping's order. Only samples are copied, unless a tensor is not contiguous. Raises ConfigError
    for no tensors, and for one that has no bytes to read (a meta tensor).
    """
    if not tensors:
        raise ConfigError("there are no tensors to take a fingerprint of", remedy=_REMEDY)
    num_blocks = _blocks_a_span(len(tensors))
    digest = sha256(b"kvhoist tensors v1\n")
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), [int(n) for n in tensor.shape]]).encode())
        for block in _sample_tensor(name, tensor, num_blocks):
            digest.update(block)
    return f"tensors-v1:{digest.hexdigest()}"


def _weight_files(root: Path) -> list[Path]:
    suffixes = (*_SAFETENSORS, *_OPAQUE)
    if not root.is_dir():
        root.stat()
        found = [root] if root.suffix in suffixes else []
    else:
        found = sorted(
            f for f in root.iterdir() if f.suffix in suffixes and f.name not in _NOT_WEIGHTS and not f.is_dir()
        )
    if not found:
        raise ConfigError(
            "no weight files here", got=str(root), expected=f"files {', '.join(suffixes)}", remedy=_REMEDY
        )
    return found


def _index_texts(root: Path, files: Sequence[Path]) -> Iterator[bytes]:
    """Yield the index files of a folder, after checking that each shard that they name is there."""
    names = {file.name for file in files}
    for index in sorted(root.glob("*.index.json")) if root.is_dir() else []:
        text = index.read_bytes()
        shards = _json(index, text).get("weight_map")
        missing = sorted(set(shards.values()) - names) if isinstance(shards, dict) else ["weight_map"]
        if missing:
            raise ConfigError(f"the checkpoint lacks what {index.name} names", got=f"no {missing[0]}", remedy=_REMEDY)
        yield text


def _open(stack: ExitStack, file: Path) -> int:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    # Samples are far apart: reading ahead would fetch the whole file.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd


def _spans(file: Path, number: int, fd: int) -> tuple[bytes, list[_Span]]:
    """Return a file's header and what to sample of it."""
    file_bytes = os.fstat(fd).st_size
    if file.suffix not in _SAFETENSORS:
        # Up to 1,024 spans, so that a file of unread format gets samples as a file of many tensors does.
        pieces = max(1, min(file_bytes >> 20, 1024))
        ends = [i * file_bytes // pieces for i in range(pieces + 1)]
        return b"", [_Span(number, start, end - start) for start, end in pairwise(ends)]
    header_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - 8):
        raise _broken(file, f"a header of {header_bytes} bytes in a file of {file_bytes}")
    header = _read(fd, file, 8, header_bytes)
    spans = []
    for name, entry in _json(file, header).items():
        if name == "__metadata__":
            continue
        try:
            start, end = map(as_index, entry["data_offsets"])
            inside = 0 <= start <= end <= file_bytes - 8 - header_bytes
        except (KeyError, TypeError, ValueError):
            inside = False
        if not inside:
            raise _broken(file, f"tensor {name!r} outside of the file's {file_bytes} bytes")
        spans.append(_Span(number, 8 + header_bytes + start, end - start))
    return header, spans


def _sample_files(fds: Sequence[int], spans: Sequence[_Span]) -> Iterable[bytes]:
    """Return digests of all samples, in order. Read by threads: a cold disk answers many reads at once."""
    num_blocks = _blocks_a_span(len(spans))
    reads = [
        (fds[span.file], span.offset_bytes + offset, min(BLOCK_BYTES, span.num_bytes - offset))
        for span in spans
        for offset in sample_offsets(span.num_bytes, num_blocks)
    ]
    tasks = [reads[i : i + _READS_A_TASK] for i in range(0, len(reads), _READS_A_TASK)]
    with on_any_core(), ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kvhoist-fingerprint") as pool:
        return list(pool.map(_digest_of, tasks))


def _digest_of(reads: Sequence[tuple[int, int, int]]) -> bytes:
    return sha256(b"".join(os.pread(fd, num_bytes, offset) for fd, offset, num_bytes in reads)).digest()


def _read(fd: int, file: Path, offset: int, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = os.pread(fd, num_bytes, offset)
        if not part:
            raise _broken(file, "an end in the middle of its header")
        parts.append(part)
        offset, num_bytes = offset + len(part), num_bytes - len(part)
    return b"".join(parts)


def _sample_tensor(name: str, tensor: Any, num_blocks: int) -> Iterator[bytes]:
    if getattr(tensor, "data_ptr", None) is None:
        flat = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        for offset in sample_offsets(flat.nbytes, num_blocks):
            yield flat[offset : offset + BLOCK_BYTES].tobytes()
        return
    if tensor.device.type == "meta":
        raise ConfigError(f"tensor {name!r} is on the meta device: it has no bytes", remedy=_REMEDY)
    element_bytes = tensor.element_size()
    flat_tensor = tensor.detach().reshape(-1)
    for offset in sample_offsets(flat_tensor.numel() * element_bytes, num_blocks):
        first = offset // element_bytes
        # Copied by address, because numpy has no bfloat16 or float8.
        block = flat_tensor[first : first + max(1, BLOCK_BYTES // element_bytes)].cpu().contiguous()
        yield ctypes.string_at(block.data_ptr(), block.numel() * element_bytes)


def _blocks_a_span(num_spans: int) -> int:
    return max(1, min(_MAX_BLOCKS_A_TENSOR, _BUDGET_BLOCKS // max(1, num_spans)))


def _json(file: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise _broken(file, f"no JSON ({error})") from None
    if not isinstance(value, dict):
        raise _broken(file, "JSON that is no object")
    return value


def _broken(file: Path, got: str) -> ConfigError:
    return ConfigError(f"{file.name} is damaged or truncated", got=got, remedy=_REMEDY)
