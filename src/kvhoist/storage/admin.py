"""What an operator does with a store folder: list, describe, check every page, remove. The CLI stands on this."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from kvhoist.errors import ConfigError
from kvhoist.messages import StorageKey
from kvhoist.storage.file import FileStore
from kvhoist.storage.file.folder import Folder
from kvhoist.storage.record import RecordHeader, Sealer, read_header
from kvhoist.units import format_bytes

_NO_LIMIT_BYTES = 1 << 60  # so that every segment without an owner is adopted
_BATCH_BYTES = 32 << 20

Progress = Callable[[int, int], None]
"""Called with the number of pages done and of all pages."""


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    """The pages of one namespace in a folder; ages in seconds since they were written, 0.0 where there are none."""

    namespace: bytes
    fields: dict[str, str]
    num_pages: int
    num_bytes: int
    youngest_s: float
    oldest_s: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "namespace": self.namespace.hex(),
            "fields": self.fields,
            "num_pages": self.num_pages,
            "bytes": self.num_bytes,
            "youngest_s": round(self.youngest_s, 3),
            "oldest_s": round(self.oldest_s, 3),
        }


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """`bad`: the pages that failed the check, and why. `damaged_headers`: slots and segments that were found unusable
    when the folder was opened. `repaired`: whether they were taken out of use, or only reported."""

    num_pages: int
    num_bytes: int
    bad: tuple[tuple[StorageKey, str], ...]
    damaged_headers: int
    faults: dict[str, str]
    repaired: bool

    @property
    def clean(self) -> bool:
        return not self.bad and not self.damaged_headers and not self.faults

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_pages": self.num_pages,
            "bytes": self.num_bytes,
            "bad": [{"key": str(key), "reason": reason} for key, reason in self.bad],
            "damaged_headers": self.damaged_headers,
            "faults": self.faults,
            "repaired": self.repaired,
            "clean": self.clean,
        }


@dataclass(frozen=True, slots=True)
class RemoveReport:
    """`left_pages` lie in segments of running processes, which alone may remove them."""

    namespaces: tuple[bytes, ...]
    removed_pages: int
    left_pages: int


def list_namespaces(folder: str | Path) -> list[NamespaceSummary]:
    """Summarise each namespace that has pages or is noted in the folder, the largest first. Changes nothing."""
    with FileStore(folder, read_only=True) as store:
        notes = store.namespaces()
        headers = [header for _, raw in store.records() if (header := read_header(raw)) is not None]
    now = time.time()
    groups = {digest: list(group) for digest, group in groupby(sorted(headers, key=_namespace), key=_namespace)}
    summaries = []
    for digest in {*groups, *notes}:
        group = groups.get(digest, [])
        ages = [max(0.0, now - header.written_at) for header in group] or [0.0]
        num_bytes = sum(header.blob_bytes for header in group)
        summaries.append(NamespaceSummary(digest, notes.get(digest, {}), len(group), num_bytes, min(ages), max(ages)))
    return sorted(summaries, key=lambda summary: (-summary.num_bytes, summary.namespace))


def describe(folder: str | Path) -> dict[str, Any]:
    """Return plain data about the folder: pages, bytes of pages and of files, segments, faults. Changes nothing."""
    summaries = list_namespaces(folder)
    with FileStore(folder, read_only=True) as store:
        files = store.segment_bytes()
        return {
            "folder": str(store.folder),
            "num_namespaces": len(summaries),
            "num_pages": sum(summary.num_pages for summary in summaries),
            "page_bytes": sum(summary.num_bytes for summary in summaries),
            "num_segments": len(files),
            "file_bytes": sum(files),
            "file_text": format_bytes(sum(files)),
            "damaged_headers": store.stats().quarantined_pages,
            "faults": store.faults(),
        }


def scrub(
    folder: str | Path, sealer: Sealer, *, progress: Progress | None = None, read_only: bool = False
) -> ScrubReport:
    """Read and check every page of the folder, and take bad ones out of use (with `read_only` only report them). Pages
    in segments of running processes are checked, but left to their owners."""
    Folder.check(folder)
    with FileStore(folder, read_only=read_only, capacity=_NO_LIMIT_BYTES) as store:
        damaged = store.stats().quarantined_pages
        records = list(store.records())
        bad: list[tuple[StorageKey, str]] = []
        done = num_bytes = 0
        for batch in _batches(records):
            bad += _check(store, sealer, batch)
            done += len(batch)
            num_bytes += sum(length for _, length in batch)
            if progress is not None:
                progress(done, len(records))
        return ScrubReport(len(records), num_bytes, tuple(bad), damaged, store.faults(), repaired=not read_only)


def remove(folder: str | Path, namespace_prefix: str | None = None) -> RemoveReport:
    """Remove all pages, or those of the namespaces whose digest begins with the hex digits `namespace_prefix`.

    Raises ConfigError where no namespace begins so, and for "", which is what a script's unset variable gives.
    """
    if namespace_prefix is not None and not namespace_prefix.strip():
        raise ConfigError(
            "an empty namespace names none", expected="its first hex digits", remedy="Leave it out to remove all pages."
        )
    Folder.check(folder)
    with FileStore(folder, capacity=_NO_LIMIT_BYTES) as store:
        known = {key.page.namespace for key, _ in store.records()} | set(store.namespaces())
        chosen = sorted(digest for digest in known if digest.hex().startswith((namespace_prefix or "").lower()))
        if namespace_prefix is not None and not chosen:
            raise ConfigError(
                "no namespace in this store begins so",
                got=repr(namespace_prefix),
                choices=sorted(digest.hex()[:16] for digest in known) or ["none: the store is empty"],
            )
        removed = sum(store.remove_namespace(digest) for digest in chosen)
        left = [key.page.namespace for key, _ in store.records() if key.page.namespace in chosen]
        for digest in set(chosen).difference(left):
            store.forget_namespace_note(digest)
        return RemoveReport(tuple(chosen), removed, len(left))


def _check(store: FileStore, sealer: Sealer, batch: list[tuple[StorageKey, int]]) -> list[tuple[StorageKey, str]]:
    """Read pages, take bad copies out of use (on disk where `store` may write) and look at the copies behind them."""
    keys = [key for key, _ in batch]
    blobs = [memoryview(bytearray(length)) for _, length in batch]
    bad = []
    for key, blob, header in zip(keys, blobs, store.get(keys, blobs), strict=True):
        fault = "unreadable, or gone meanwhile" if header is None else sealer.check(key, header, blob)
        if fault is not None:
            bad.append((key, fault))
    store.quarantine([key for key, _ in bad])
    faulty = {key for key, _ in bad}
    behind = [(key, length) for key, length in batch if key in faulty and store.exists([key])[0]]
    return bad + (_check(store, sealer, behind) if behind else [])


def _namespace(header: RecordHeader) -> bytes:
    return header.key.page.namespace


def _batches(records: list[tuple[StorageKey, bytes]]) -> Iterator[list[tuple[StorageKey, int]]]:
    """Cut records into batches of about `_BATCH_BYTES`, with the length of each blob."""
    batch: list[tuple[StorageKey, int]] = []
    num_bytes = 0
    for key, raw in records:
        header = read_header(raw)
        if header is None:
            continue
        if batch and num_bytes + header.blob_bytes > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append((key, header.blob_bytes))
        num_bytes += header.blob_bytes
    if batch:
        yield batch
