"""What prefetches were good for: each page followed from its order to its first load, or to its end without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from kvhoist.control.entry import Entry
from kvhoist.control.tiers import Tier


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """Counters since the start, in pages; a page has `page_bytes` bytes on all ranks together.

    asked: ordered from storage. hit: loaded, by whichever request, after it came; once a prefetch. late: it came when
    the requests that had waited for it had gone on without it (it may be a hit yet). cancelled: not read, since
    nobody waited for it any more. useless: it came and left the host tier without ever having been loaded.
    """

    asked_pages: int
    hit_pages: int
    late_pages: int
    cancelled_pages: int
    useless_pages: int
    page_bytes: int

    def by_outcome(self) -> dict[str, int]:
        """Return the pages by what they are counted as: asked, hit, late, cancelled, useless."""
        return {name.removesuffix("_pages"): pages for name, pages in asdict(self).items() if name != "page_bytes"}


class Prefetches:
    """Counts them. A few dict operations a page that is prefetched, nothing for others while none is unused."""

    def __init__(self) -> None:
        self._asked = self._hit = self._late = self._cancelled = self._useless = 0
        self._unused: dict[Entry, None] = {}

    def ask(self, entries: Sequence[Entry]) -> None:
        """These pages are about to be read."""
        self._asked += len(entries)

    def cancel(self, num_pages: int) -> None:
        """So many pages were not read: their job was cancelled."""
        self._cancelled += num_pages

    def arrive(self, entries: Sequence[Entry], *, late: bool) -> None:
        """These pages are ready in the host tier; `late`: who waited for them has gone on."""
        self._late += len(entries) if late else 0
        self.look(2 * len(entries))
        self._unused.update(dict.fromkeys(entries))

    def use(self, entries: Sequence[Entry]) -> None:
        """These pages are loaded."""
        self._hit += self._forget(entries)

    def refill(self, entries: Sequence[Entry]) -> None:
        """These pages get new copies in the host tier: what they had there is gone."""
        self._useless += self._forget(entries)

    def look(self, num_pages: int) -> None:
        """See whether up to `num_pages` of the unused pages, those looked at longest ago, have left the host tier."""
        unused = self._unused
        for entry in list(islice(unused, num_pages)):
            del unused[entry]
            if entry.is_ready(Tier.HOST):
                unused[entry] = None
            else:
                self._useless += 1

    def stats(self, page_bytes: int, most_looks: int) -> PrefetchStats:
        """Return the counters. Only `most_looks` unused pages are looked at for it: what of the others has left the
        host tier is counted a little later."""
        self.look(most_looks)
        return PrefetchStats(self._asked, self._hit, self._late, self._cancelled, self._useless, page_bytes)

    def _forget(self, entries: Sequence[Entry]) -> int:
        unused = self._unused
        if not unused:
            return 0
        found = [entry for entry in entries if entry in unused]
        for entry in found:
            del unused[entry]
        return len(found)
