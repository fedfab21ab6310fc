"""One page in two slots, which a crash can leave behind: which of the two is whole."""

from __future__ import annotations

from collections.abc import Sequence

from kvhoist.storage.file.shelf import Place
from kvhoist.storage.record import blob_bytes_of, header_fault, is_blob_of

Found = tuple[int, bytes, Place]
"""When a page was written, its identity, and where it lies."""


def without_duplicates(pages: Sequence[Found]) -> tuple[list[Found], list[Place]]:
    """Return the pages, each once, in the order in which they were written, and the places of further copies.

    Of several copies the newest whose blob is the one that its header describes stays: a slot may be half overwritten
    while its old header is still on disk, so neither age nor header tells. Reads the blobs of such pages alone.
    """
    copies: dict[bytes, list[Found]] = {}
    for page in sorted(pages, key=lambda page: page[0]):
        copies.setdefault(page[1], []).append(page)
    kept, dropped = [], []
    for same in copies.values():
        best = same[-1] if len(same) == 1 else next((page for page in reversed(same) if _is_whole(page[2])), same[-1])
        kept.append(best)
        dropped += [page[2] for page in same if page is not best]
    kept.sort(key=lambda page: page[0])
    return kept, dropped


def _is_whole(place: Place) -> bool:
    shelf, slot = place
    try:
        header = shelf.segment.read_headers(slot, 1)[0]
        if header_fault(header) is not None or blob_bytes_of(header) > shelf.segment.pitch_bytes:
            return False
        blob = memoryview(bytearray(blob_bytes_of(header)))
        return shelf.segment.read_blobs(slot, [blob]) and is_blob_of(header, blob)
    except OSError:
        return False
