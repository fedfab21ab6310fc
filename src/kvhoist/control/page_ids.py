"""Who holds which page of a tier: every page id is free or held, never both, never lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvhoist.control.untracked import untrack
from kvhoist.errors import CapacityError, ConfigError, PageIdError

MAX_PAGES = 1 << 28
"""More pages than any tier has; what the directory's counters can hold."""


class PageIds:
    """The ids 0 … `num_pages` - 1 of one tier's pages. Freed ids are given out again before fresh ones.

    Raises ConfigError for a number of pages that is not 0 … 2**28.
    """

    __slots__ = ("_freed", "_fresh", "_held", "num_pages")

    def __init__(self, num_pages: int) -> None:
        if not isinstance(num_pages, int) or isinstance(num_pages, bool) or not 0 <= num_pages <= MAX_PAGES:
            raise ConfigError(
                "a tier cannot have this number of pages", got=repr(num_pages), expected=f"an int from 0 to {MAX_PAGES}"
            )
        self.num_pages = num_pages
        self._freed: list[int] = untrack([])
        self._fresh = 0
        self._held = bytearray()

    @property
    def num_free(self) -> int:
        return len(self._freed) + self.num_pages - self._fresh

    @property
    def num_held(self) -> int:
        return self._fresh - len(self._freed)

    def allocate(self, num_pages: int) -> list[int]:
        """Return `num_pages` ids, now held. Raises CapacityError, giving out none, when fewer are free."""
        if not 0 <= num_pages <= self.num_free:
            raise CapacityError("not that many page ids are free", got=num_pages, expected=f"at most {self.num_free}")
        freed, held = self._freed, self._held
        keep = max(len(freed) - num_pages, 0)
        ids = freed[keep:]
        del freed[keep:]
        for page in ids:
            held[page] = 1
        num_fresh = num_pages - len(ids)
        if num_fresh:
            ids += range(self._fresh, self._fresh + num_fresh)
            held += b"\x01" * num_fresh
            self._fresh += num_fresh
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Take ids back. Raises PageIdError for one that is not held (a double free) or never was an id here; those
        before it are taken back."""
        freed, held, fresh = self._freed, self._held, self._fresh
        append = freed.append
        for page in ids:
            if not 0 <= page < fresh or not held[page]:
                raise self._not_held(page)
            held[page] = 0
            append(page)

    def is_held(self, page: int) -> bool:
        return 0 <= page < self._fresh and self._held[page] == 1

    def audit(self, held: Sequence[int]) -> None:
        """Raise PageIdError unless exactly the ids in `held`, each once, are held, and all others are free."""
        if len(set(held)) != len(held):
            raise PageIdError("a page id is held twice", got=_first_twice(held))
        here = {page for page in range(self._fresh) if self._held[page]}
        if leaked := here.difference(held):
            raise PageIdError("page ids leaked: held, but by no page", got=sorted(leaked)[:8])
        if foreign := set(held).difference(here):
            raise PageIdError("page ids in use that are free or foreign", got=sorted(foreign)[:8])
        if len(set(self._freed)) != len(self._freed) or here.intersection(self._freed):
            raise PageIdError("the list of free page ids holds one twice, or one that is held")
        if len(here) + len(self._freed) != self._fresh or self._fresh > self.num_pages:
            raise PageIdError("page ids are neither free nor held", got=f"{len(here)} held, {len(self._freed)} freed")

    def _not_held(self, page: int) -> PageIdError:
        known = 0 <= page < self.num_pages
        return PageIdError(
            f"page id {page} was freed but is not held" if known else "a page id that never was one of this tier",
            got=page,
            expected=f"a held id below {self.num_pages}",
            remedy="Free each page once, where it was reserved.",
        )


def _first_twice(ids: Sequence[int]) -> int:
    seen: set[int] = set()
    return next(page for page in ids if page in seen or seen.add(page))  # type: ignore[func-returns-value]
