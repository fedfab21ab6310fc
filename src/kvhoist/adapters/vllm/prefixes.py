"""How much of a prompt the tiers below the device can bring, and what a request must wait for first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvhoist.adapters.vllm.requests import PageShape, RequestState
from kvhoist.control.directory import Space
from kvhoist.control.plane import ControlPlane
from kvhoist.control.prefetch_policy import PrefetchPolicy
from kvhoist.control.tiers import READY, Tier

_MOST_REFUSED = 4096
_ASK_AGAIN_S = 0.02
"""How often storage is asked for pages that another engine has announced: a page takes about as long to get there."""
_LATER = -1
"""In the place of the job that a request waits for: nothing, until storage is to be asked again."""
_REFUSED_S = 60.0
"""How long a page that failed to load is a miss. Its copy stays in the host tier, below its descendants', and may be
sound: what failed may have been the copying."""


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a request may wait for storage to answer, in seconds, and to bring pages."""

    lookup_s: float
    prefetch: PrefetchPolicy


class Prefixes:
    """Answers how many blocks can be loaded for a request, asking storage and prefetching on the way. Never blocks.

    A request waits for storage at most once for an answer and once for pages; what is late then is recomputed, and not
    read if nobody else waits for it. Of pages that another engine has announced it asks again, until none has come for
    as long as it would wait for an answer. What came stays in the host tier until `release`.
    """

    def __init__(
        self, plane: ControlPlane, shape: PageShape, waits: Waits, *, num_held_back: int, clock: Callable[[], float]
    ) -> None:
        self._plane = plane
        self._shape = shape
        self._waits = waits
        self._num_held_back = num_held_back
        self._clock = clock
        self._refused: dict[bytes, float] = {}

    def find(self, space: Space, state: RequestState, num_computed_tokens: int) -> range | None:
        """Return the blocks that can be loaded beyond `num_computed_tokens` (whole blocks); None to be asked again
        later. The last token is left to compute, for its logits."""
        shape = self._shape
        first = num_computed_tokens // shape.block_tokens
        most = (state.request.num_tokens - 1) // shape.block_tokens - self._num_held_back
        keys = state.update_keys(shape.hashes_per_page)
        page, last_page = first // shape.blocks_per_page, min(shape.pages_of(most), len(keys))
        if page >= last_page or not state.loads:
            return range(first, first)
        if state.waits_for is not None and not self._is_over(state):
            return None
        ready = self._num_ready(space, keys, page, last_page)
        if ready < last_page:
            state.waits_for = self._fetch(space, state, keys, ready, last_page)
            if state.waits_for is not None:
                return None
        return range(first, max(first, min(ready * shape.blocks_per_page, most)))

    def release(self, state: RequestState) -> None:
        """Neither hold nor await pages for `state` any more: it runs, or has ended."""
        if state.pins is not None:
            if state.waits_for is not None:
                self._plane.flights.leave(state.waits_for, state.pins)
            state.pins.release()
            state.pins = None
        state.waits_for = None

    def refuse(self, keys: Sequence[bytes]) -> None:
        """Do not load these pages, which failed, from the copies that the host has now; not for a while."""
        if len(self._refused) + len(keys) > _MOST_REFUSED:
            self._refused.clear()
        self._refused.update(dict.fromkeys(keys, self._clock() + _REFUSED_S))

    def accept(self, keys: Sequence[bytes]) -> None:
        """These pages have new copies in the host tier."""
        if self._refused:
            for key in keys:
                self._refused.pop(key, None)

    def _is_over(self, state: RequestState) -> bool:
        """Tell whether the wait of `state` is over: its job is done, or took too long."""
        assert state.waits_for is not None
        if state.waits_for == _LATER:
            return self._clock() >= state.asks_at
        assert state.deadline is not None
        if not self._plane.flights.is_open(state.waits_for):
            state.waits_for = None
            return True
        if self._clock() < state.deadline and not self._plane.flights.hangs(state.waits_for):
            return False
        if state.pins is not None:
            self._plane.flights.leave(state.waits_for, state.pins)
        state.waits_for = None
        state.asked_storage = state.late = True
        return True

    def _num_ready(self, space: Space, keys: Sequence[bytes], page: int, last_page: int) -> int:
        host = READY[Tier.HOST]
        for entry in self._plane.directory.chain(space, keys, page, last_page):
            if not entry.flags & host or (self._refused and self._is_refused(entry.key)):
                break
            page += 1
        return page

    def _is_refused(self, key: bytes) -> bool:
        until = self._refused.get(key)
        if until is not None and self._clock() >= until:
            del self._refused[key]
            return False
        return until is not None

    def _fetch(self, space: Space, state: RequestState, keys: Sequence[bytes], page: int, last_page: int) -> int | None:
        """Start, or join, what may bring keys[page:last_page] to the host tier; None where nothing may."""
        if state.late or state.prefetched.stop > page:  # it was tried
            return None
        entry = self._plane.directory.find(space, keys[page])
        if entry is None or entry.is_ready(Tier.HOST):
            return self._ask(space, state, keys, page, last_page) if entry is None else None
        filling = self._plane.flights.job_filling(entry, Tier.HOST)
        if filling is not None and self._plane.flights.hangs(filling):
            return None
        if filling is not None:
            return self._await_pages(state, filling, last_page - page)
        if not entry.is_ready(Tier.STORAGE):
            return self._ask(space, state, keys, page, last_page)
        stop = self._num_stored(space, keys, page, last_page)
        state.prefetched = range(state.prefetched.start if state.prefetched.stop == page else page, stop)
        job = self._plane.prefetch(space, keys, page, stop, for_whom=state.request.request_id)
        return None if job is None else self._await_pages(state, job.id, stop - page)

    def _ask(self, space: Space, state: RequestState, keys: Sequence[bytes], page: int, last_page: int) -> int | None:
        if not self._plane.has_storage:
            return None
        now, again = self._clock(), state.asked_storage
        if again and not self._comes(state, page, now):
            return None
        if again and now < state.asks_at:
            return _LATER
        if not again or page > state.asked_page:
            state.patient_until = now + self._waits.lookup_s
        state.asked_storage, state.asked_page, state.asks_at = True, page, now + _ASK_AGAIN_S
        keys = keys[:last_page]
        job = self._plane.lookup(space, keys, page, again=state.announced_tokens > 0)
        job_id = job.id if job is not None else self._plane.lookups.under_way(space, keys, page)
        return None if job_id is None else self._wait(state, job_id, self._waits.lookup_s)

    def _comes(self, state: RequestState, page: int, now: float) -> bool:
        """Tell whether storage is to be asked again for a page that it did not have: another engine has announced it,
        and has brought others meanwhile or may still be at it."""
        announced = (page + 1) * self._shape.page_tokens <= state.announced_tokens
        return announced and (page > state.asked_page or now < state.patient_until)

    def _num_stored(self, space: Space, keys: Sequence[bytes], page: int, last_page: int) -> int:
        for entry in self._plane.directory.chain(space, keys, page, last_page):
            if not entry.is_ready(Tier.STORAGE) or entry.page(Tier.HOST) is not None:
                break
            page += 1
        return page

    def _await_pages(self, state: RequestState, job_id: int, num_pages: int) -> int | None:
        seconds = self._waits.prefetch.limit_s(num_pages)
        if seconds <= 0:
            self._plane.flights.pass_by(job_id)
        else:
            state.pins = state.pins or self._plane.pins()
            self._plane.flights.join(job_id, state.pins)
        return self._wait(state, job_id, seconds)

    def _wait(self, state: RequestState, job_id: int, seconds: float) -> int | None:
        """Let `state` wait for a job; None, and it is late at once, where there is no time for that."""
        if seconds <= 0:
            state.late = True
            return None
        state.deadline = self._clock() + seconds
        return job_id
