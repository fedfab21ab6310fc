"""Why was this not a hit? Per page the tiers that hold it, and for the first miss the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from itertools import groupby
from typing import Any

from kvhoist.control.directory_table import EntryTable
from kvhoist.control.entry import Entry, Space
from kvhoist.control.history import Happened, History, What
from kvhoist.control.tiers import READY_ANY, Tier


class MissKind(StrEnum):
    """Why the first page that no tier holds is not there."""

    NEVER_SEEN = "never_seen"
    NOT_STORED = "not_stored"
    FILLING = "filling"
    EVICTED = "evicted"
    FAILED = "failed"
    CLEARED = "cleared"
    DROPPED = "dropped"
    OTHER_NAMESPACE = "other_namespace"
    REMAINDER = "remainder"


_KINDS = {
    What.EVICTED: MissKind.EVICTED,
    What.FAILED: MissKind.FAILED,
    What.SKIPPED: MissKind.NOT_STORED,
    What.CLEARED: MissKind.CLEARED,
    What.DROPPED: MissKind.DROPPED,
}


@dataclass(frozen=True, slots=True)
class Miss:
    """Why page `page` is a miss. `text` is for people and tells the last event of every tier; `kind`, `tier`, `when`
    (seconds of the wall clock) and `reason` (for whom, or why) are the latest one's, where they are known; `fields` are
    those in which the other namespace differs."""

    kind: MissKind
    page: int
    text: str
    tier: str | None = None
    when: float | None = None
    reason: str | None = None
    fields: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class PageState:
    """The tiers in which a page is ready, and in which it is being filled, by name."""

    tiers: tuple[str, ...]
    filling: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the directory knows of a prompt's pages. `pages[i]` covers tokens i * page_tokens on; the first
    `num_hit_pages` are hits; `miss` tells of what comes first after them, None where all tokens are covered. Without
    `has_storage` no store is attached that could have held more."""

    num_tokens: int
    page_tokens: int
    pages: tuple[PageState, ...]
    num_hit_pages: int
    remainder_tokens: int
    miss: Miss | None
    has_storage: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        hit = self.num_hit_pages * self.page_tokens
        lines = [f"{hit} of {self.num_tokens} tokens are cached ({_pages(self.num_hit_pages)} of {self.page_tokens})."]
        first = 0
        for state, run in groupby(self.pages):
            last = first + len(list(run)) - 1
            name = f"page {first}" if first == last else f"pages {first}-{last}"
            where = ", ".join([*state.tiers, *(f"{tier} (being filled)" for tier in state.filling)])
            lines.append(f"  {name}: {where or 'in no tier'}")
            first = last + 1
        if self.miss is not None:
            lines.append(self.miss.text)
        if self.remainder_tokens and (self.miss is None or self.miss.kind is not MissKind.REMAINDER):
            lines.append(f"{_remainder(self.remainder_tokens, self.page_tokens)}")
        if self.miss is not None and not self.has_storage:
            lines.append("There is no store attached: only device and host memory are looked at.")
        return "\n".join(lines)


def explain_keys(
    space: Space,
    others: Sequence[Space],
    table: EntryTable,
    history: History,
    keys: Sequence[bytes],
    num_tokens: int,
    page_tokens: int,
) -> Explanation:
    """Explain the chain `keys` of a prompt of `num_tokens` in `space`; `others` are the spaces of the same group."""
    found = [table.entry(space, key) for key in keys]
    pages = tuple(_state(entry) for entry in found)
    num_hits = next((i for i, page in enumerate(pages) if not page.tiers), len(pages))
    remainder = max(num_tokens - len(keys) * page_tokens, 0)
    miss: Miss | None = None
    if num_hits < len(keys):
        miss = _miss(space, others, table, history, num_hits, keys[num_hits], pages[num_hits].filling)
    elif remainder:
        miss = Miss(MissKind.REMAINDER, num_hits, _remainder(remainder, page_tokens))
    return Explanation(num_tokens, page_tokens, pages, num_hits, remainder, miss)


def _state(entry: Entry | None) -> PageState:
    if entry is None:
        return PageState(())
    ready = tuple(str(tier) for tier in Tier if entry.is_ready(tier))
    return PageState(ready, tuple(str(tier) for tier in Tier if entry.is_filling(tier)))


def _miss(
    space: Space,
    others: Sequence[Space],
    table: EntryTable,
    history: History,
    page: int,
    key: bytes,
    filling: tuple[str, ...],
) -> Miss:
    if filling:
        text = f"Page {page} is being filled in {' and '.join(filling)}: it becomes a hit when that is confirmed."
        return Miss(MissKind.FILLING, page, text, tier=filling[0])
    trail = history.trail(space.serial, key)
    if trail:
        return _from_history(page, trail)
    for other in others:
        entry = table.entry(other, key)
        if entry is not None and entry.flags & READY_ANY:
            fields = tuple(space.namespace.differs_from(other.namespace))
            text = f"Page {page} is cached in another namespace, which differs in: {', '.join(fields)}."
            return Miss(MissKind.OTHER_NAMESPACE, page, text, fields=fields)
    text = f"Page {page} was never seen (or left more than {history.max_pages} pages of history ago)."
    return Miss(MissKind.NEVER_SEEN, page, text)


def _from_history(page: int, trail: Sequence[Happened]) -> Miss:
    last, *earlier = trail
    text = f"Page {page} {_told(last)}." + "".join(f" Before that it {_told(happened)}." for happened in earlier)
    return Miss(_KINDS[last.what], page, text, str(last.tier), last.when, last.text or None)


def _told(happened: Happened) -> str:
    tier, reason = str(happened.tier), happened.text
    when = datetime.fromtimestamp(happened.when).astimezone().isoformat(sep=" ", timespec="seconds")
    because = f": {reason}" if reason else ""
    texts = {
        What.EVICTED: f"was evicted from {tier} at {when}" + (f", to make room for {reason}" if reason else ""),
        What.FAILED: f"could not be brought to {tier} at {when}{because}",
        What.SKIPPED: f"was not stored at {when}{because}",
        What.CLEARED: f"was cleared from {tier} at {when}",
        What.DROPPED: f"was taken out of {tier} at {when}{because}",
    }
    return texts[happened.what]


def _remainder(num_tokens: int, page_tokens: int) -> str:
    verb = "token is" if num_tokens == 1 else "tokens are"
    return f"The last {num_tokens} {verb} the remainder of a page: only whole pages of {page_tokens} tokens are cached."


def _pages(num_pages: int) -> str:
    return f"{num_pages} page" if num_pages == 1 else f"{num_pages} pages"
