"""What a batch of storage I/O came to, page by page."""

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


@dataclass(frozen=True, slots=True)
class PageOutcomes:
    """`reasons[i]` is None where page `i` is good, else why not, for people. `bytes` counts the good pages' blobs,
    `seconds` runs from the start of the first chunk to the end of the last (0.0 where none ran)."""

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
    def error(self) -> str | None:
        """All reasons in one line, most frequent first (`"3 x missing; 1 x …"`), or None where every page is good."""
        counts = Counter(reason for reason in self.reasons if reason is not None)
        return "; ".join(f"{count} x {reason}" for reason, count in counts.most_common()) or None


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
