"""What storage I/O came to: a batch, page by page; all of it, in counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvhoist.errors import StorageError
from kvhoist.messages import StorageKey

_T = TypeVar("_T")

MISSING = "missing"
NOT_STORED = "dropped: the store has no room or could not write"
QUEUE_FULL = "dropped: queue full"
CANCELLED = "cancelled before it began"
PENDING = "pending: storage hangs in it"


@dataclass(frozen=True, slots=True)
class PageOutcomes:
    """`reasons[i]` is None where page `i` is good, else why not, for people. `bytes` counts the good pages' blobs,
    `seconds` runs from the start of the first chunk to the end of the last (0.0 where none ran). Only where a part of a
    batch is told early, the reason of the others is PENDING."""

    reasons: tuple[str | None, ...]
    bytes: int = 0
    seconds: float = 0.0

    @property
    def num_pages(self) -> int:
        return len(self.reasons)

    @property
    def failed_pages(self) -> tuple[int, ...]:
        """Indices of the pages that are not good, ascending."""
        return tuple(i for i, reason in enumerate(self.reasons) if reason is not None)

    @property
    def pending_pages(self) -> tuple[int, ...]:
        """Indices of the pages of which nothing is known yet, ascending."""
        return tuple(i for i, reason in enumerate(self.reasons) if reason == PENDING)

    @property
    def error(self) -> str | None:
        """All reasons in one line, most frequent first (`"3 x missing; 1 x …"`), or None where every page is good."""
        counts = Counter(reason for reason in self.reasons if reason is not None)
        return "; ".join(f"{count} x {reason}" for reason, count in counts.most_common()) or None


@dataclass(frozen=True, slots=True)
class StorageIOStats:
    """Counters since the start, in pages; `queued_pages`, `running_pages` and `fenced` are gauges. `num_fences` counts
    how often the store was fenced off, `fenced_pages` what was not tried because of that."""

    queued_pages: int
    running_pages: int
    fenced: bool = False
    num_fences: int = 0
    fenced_pages: int = 0
    persisted_pages: int = 0
    prefetched_pages: int = 0
    found_pages: int = 0
    removed_pages: int = 0
    missing_pages: int = 0
    corrupt_pages: int = 0
    not_stored_pages: int = 0
    refused_pages: int = 0
    error_pages: int = 0
    cancelled_pages: int = 0
    persisted_bytes: int = 0
    prefetched_bytes: int = 0


def reason_of(error: BaseException) -> str:
    """Return why the pages of a call failed that raised `error`. Never raises."""
    try:
        text = str(error)
    except Exception:  # a stranger's class
        text = ""
    return f"io error: {type(error).__name__}: {text}" if text else f"io error: {type(error).__name__}"


def of_each(keys: Sequence[StorageKey], answers: list[_T]) -> list[_T]:
    """Return `answers`, a store's to `keys`. Raises StorageError where it did not answer for each."""
    if len(answers) != len(keys):
        raise StorageError("the store did not answer for each page", got=f"{len(answers)} answers to {len(keys)} keys")
    return answers
