"""What the scheduler's side counts for the metrics: hits by tier, misses by reason, what was moved, page states."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from kvhoist.adapters.vllm.requests import PageShape, RequestState
from kvhoist.control.directory import Space
from kvhoist.control.directory_events import Event
from kvhoist.control.explain import MissKind
from kvhoist.control.plane import ControlPlane
from kvhoist.control.tiers import Tier
from kvhoist.messages import LEFT_OUT, Job

_MOST_GONE = 1 << 16
_PERIOD_S = 0.25
_MOST_LOOKS = 256

LATE = "late"
"""Miss: storage had not answered, or not brought the pages, in the time that a request may wait."""

GAUGES = ("host_capacity_pages", "host_free_pages", "host_ready_pages", "host_filling_pages", "open_jobs")


class SchedulerCounts:
    """Counts since the start, handed out as differences. A hit is counted when its load is done. A miss is counted once
    a request, when it is first scheduled, in tokens that whole blocks below its last token hold and no tier brought."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._total: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._counted = False
        self._num_settled = 0
        self._next_s = 0.0
        self._gone: dict[bytes, tuple[MissKind, bytes]] = {}
        plane.directory.subscribe(self._note_removed)

    # -- requests ------------------------------------------------------------------------------------------------

    def look_up(self, space: Space, state: RequestState, shape: PageShape) -> None:
        """Note why the last look-up of `state` found no more than `found_blocks`."""
        per_page, keys = shape.blocks_per_page, state.keys
        found = state.found_blocks
        num_blocks = (state.request.num_tokens - 1) // shape.block_tokens
        missing = (num_blocks - found.stop) * shape.block_tokens
        if missing <= 0 or state.request.num_preemptions:
            state.missed = None
            return
        page = found.stop // per_page
        state.missed = (self._reason(space, state, keys[page]) if page < len(keys) else MissKind.REMAINDER, missing)

    def loaded(self, job: Job, fetched: range, failed_pages: frozenset[int], shape: PageShape) -> None:
        """Count what a finished load brought, of which the pages `fetched` had been fetched from storage for it."""
        per_page, blocks = shape.blocks_per_page, job.device_blocks
        failed = {block for page in failed_pages for block in blocks[page * per_page : (page + 1) * per_page]}
        failed.add(LEFT_OUT)
        num_all = sum(block not in failed for block in blocks)
        stored = blocks[fetched.start * per_page : fetched.stop * per_page] if fetched else ()
        num_stored = sum(block not in failed for block in stored)
        for tier, number in ((Tier.HOST, num_all - num_stored), (Tier.STORAGE, num_stored)):
            if number:
                self.add({f"hit_tokens.{tier}": number * shape.block_tokens})

    def tokens_by_tier(self, state: RequestState, blocks: range, shape: PageShape) -> dict[Tier, int]:
        """Return how many tokens of `blocks` were found in host memory, and how many were fetched for this request."""
        per_page = shape.blocks_per_page
        fetched = range(state.prefetched.start * per_page, state.prefetched.stop * per_page)
        num_stored = max(0, min(blocks.stop, fetched.stop) - max(blocks.start, fetched.start))
        counts = {Tier.HOST: len(blocks) - num_stored, Tier.STORAGE: num_stored}
        return {tier: number * shape.block_tokens for tier, number in counts.items() if number}

    def scheduled(self, state: RequestState) -> None:
        """Count the misses of a request that begins to run."""
        if state.missed is not None:
            reason, num_tokens = state.missed
            self.add({f"miss_tokens.{reason}": num_tokens})
            state.missed = None

    def failed(self, keys: Sequence[bytes]) -> None:
        """Remember pages that could not be brought to the host tier."""
        for key in keys:
            self._gone[key] = (MissKind.FAILED, b"")

    # -- numbers -------------------------------------------------------------------------------------------------

    def add(self, counts: Mapping[str, float]) -> None:
        self._counted = self._counted or bool(counts)
        for name, number in counts.items():
            self._total[name] = self._total.get(name, 0) + number

    def take(self, *, idle: bool = True) -> dict[str, float]:
        """Return what was counted since the last call, and the gauges; nothing where nothing was counted. Unless
        `idle`, it is told four times a second, since telling costs as much as a job."""
        flights = self._plane.flights
        if flights.num_settled == self._num_settled and not self._counted:
            return {}
        if not idle and time.monotonic() < self._next_s:
            return {}
        self._next_s = time.monotonic() + _PERIOD_S
        self._num_settled, self._counted = flights.num_settled, False
        total = self._total
        for kind, counters in flights.counters.items():
            if counters.jobs:
                total.update((f"{name}.{kind}", value) for name, value in counters.to_dict().items())
        host = self._plane.directory.stats().tiers[str(Tier.HOST)]
        total["evicted_pages"], total["no_room_pages"] = host.evicted_pages, host.no_room_pages
        prefetches = self._plane.prefetch_stats(_MOST_LOOKS)
        for outcome, pages in prefetches.by_outcome().items():
            total[f"prefetch_pages.{outcome}"] = pages
            total[f"prefetch_bytes.{outcome}"] = pages * prefetches.page_bytes
        told = self._told
        changed = {name: value - told.get(name, 0) for name, value in total.items() if value != told.get(name, 0)}
        self._told = dict(total)
        gauges = (host.capacity_pages, host.free_pages, host.ready_pages, host.filling_pages)
        changed.update(zip(GAUGES, (*gauges, self._plane.tracker.num_open), strict=True))
        return changed

    # -- inside --------------------------------------------------------------------------------------------------

    def _reason(self, space: Space, state: RequestState, key: bytes) -> str:
        entry = self._plane.directory.find(space, key)
        if entry is not None and entry.is_filling(Tier.HOST):
            return MissKind.FILLING
        if state.late:
            return LATE
        kind, namespace = self._gone.get(key, (MissKind.NEVER_SEEN, b""))
        if kind is MissKind.EVICTED and namespace != space.namespace.digest:
            return MissKind.CLEARED
        return kind

    def _note_removed(self, event: Event) -> None:
        if event.kind == "removed" and event.tier is Tier.HOST:
            gone = self._gone
            if len(gone) > _MOST_GONE:
                gone.clear()
            gone.update(dict.fromkeys(event.keys, (MissKind.EVICTED, event.namespace)))
