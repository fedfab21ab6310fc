"""Bringing a prefix onto an owned device: which pages to prefetch, load, or wait for, until all are there."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable

from kvhoist.binding import Binding
from kvhoist.control.entry import Entry
from kvhoist.control.plane import ControlPlane
from kvhoist.control.tiers import Tier
from kvhoist.lease import Match
from kvhoist.messages import JobKind
from kvhoist.transfer import Transfer


class Acquisition:
    """One request's way to its prefix. `step` is called with the cache's lock held and says what to wait for; between
    steps the lock is free. Pages found or brought are pinned at once, so that what a step saw the next one finds.

    Requests that want the same page share its transfer. A page that failed ends the prefix there.
    """

    def __init__(self, plane: ControlPlane, match: Match, binding: Binding, for_whom: str) -> None:
        self.transfers: list[Transfer] = []
        self.pins = plane.pins()
        self._plane = plane
        self._space = match.space
        self._keys = list(match.keys)
        self._limit = len(self._keys)
        self._all_transfers = binding.transfers
        self._for_whom = for_whom
        self._waits = binding.prefetching.waits  # else pages from storage are brought for later requests
        self.joined: set[int] = set()
        self._found_in: dict[int, Tier] = {}
        self._ready: list[Entry] = []
        self._arriving: list[int] = []

    def step(self, dispatch: Callable[[], object]) -> list[Transfer]:
        """Start what can be started and return the transfers to wait for: none when the prefix is complete."""
        self._drop_failed()
        entries = self._plane.directory.match(self._space, self._keys[: self._limit])
        self._pin(entries)
        job_ids = set()
        for tier, first, last in self._missing(entries):
            job_ids |= self._fetch(entries, tier, first, last)
        if len(entries) < self._limit:
            job_ids |= self._coming(self._keys[len(entries)])
        dispatch()
        job_ids = {job_id for job_id in job_ids if not self._plane.flights.hangs(job_id)}
        waits = [self._all_transfers[job_id] for job_id in sorted(job_ids) if job_id in self._all_transfers]
        # What others have cancelled is not a failure: it is fetched again.
        lasting = [transfer for transfer in waits if not self._plane.flights.is_cancelled(transfer.job.id)]
        self.transfers += [transfer for transfer in lasting if transfer not in self.transfers]
        self._ready = _leading_ready(entries)
        if job_ids:  # what another request is computing is not ours to read
            filling = self._plane.flights.job_filling
            self._arriving = _device_pages(
                itertools.takewhile(lambda e: e.is_ready(Tier.DEVICE) or filling(e, Tier.DEVICE) in job_ids, entries)
            )
        return waits

    def look(self) -> None:
        """See what is ready by now and pin it, starting nothing."""
        self._drop_failed()
        entries = self._plane.directory.match(self._space, self._keys[: self._limit])
        self._pin(entries)
        self._ready = _leading_ready(entries)

    def give_up(self, late: Transfer) -> None:
        """End the prefix before the pages that a prefetch has not brought yet, and wait for it no more."""
        coming = {key for key in late.job.keys if self._brings(late, key)}
        first = next((i for i, key in enumerate(self._keys[: self._limit]) if key in coming), self._limit)
        self._limit = first
        self._leave(late.job.id)

    def leave(self) -> None:
        """Wait for no prefetch any more."""
        for job_id in self.joined:
            self._leave(job_id)

    def only_loads(self, waits: list[Transfer]) -> bool:
        """Tell whether nothing but loads is under way."""
        return all(transfer.job.kind is JobKind.LOAD for transfer in waits)

    def pages(self, *, loading: bool) -> list[int]:
        """Return the device pages of the leading pages that the last step or look found ready (with `loading`: or on
        their way in jobs that were joined). All of them are pinned, or will be when their load is done."""
        return self._arriving if loading else _device_pages(self._ready)

    def finish(self, num_pages: int) -> list[str]:
        """Count the hit and return the tier in which each of the first `num_pages` pages was found. Pages that storage
        lacks, because it was full or out of order when they came, are persisted again."""
        self._plane.directory.touch(self._ready[:num_pages])
        if self._plane.persists:
            self._plane.persist(self._ready[:num_pages])
        return [str(self._found_in.get(index, Tier.HOST)) for index in range(num_pages)]

    def _drop_failed(self) -> None:
        failed = {
            transfer.job.keys[page]
            for transfer in self.transfers
            if transfer.completion is not None
            for page in transfer.completion.failed_pages
        }
        if failed:
            first = next((i for i, key in enumerate(self._keys[: self._limit]) if key in failed), self._limit)
            self._limit = first

    def _pin(self, entries: list[Entry]) -> None:
        for tier in (Tier.DEVICE, Tier.HOST):
            self.pins.add([e for e in entries if e.is_ready(tier)], tier)
        for i, entry in enumerate(entries):
            nearest = next(tier for tier in Tier if entry.is_ready(tier))
            self._found_in.setdefault(i, nearest)

    def _missing(self, entries: list[Entry]) -> list[tuple[Tier, int, int]]:
        """Return runs of pages that the device lacks, by the tier that has them: (tier, first, last + 1)."""
        runs: list[tuple[Tier, int, int]] = []
        for i, entry in enumerate(entries):
            if entry.is_ready(Tier.DEVICE):
                continue
            tier = Tier.HOST if entry.is_ready(Tier.HOST) else Tier.STORAGE
            if runs and runs[-1][0] is tier and runs[-1][2] == i:
                runs[-1] = (tier, runs[-1][1], i + 1)
            else:
                runs.append((tier, i, i + 1))
        return runs

    def _fetch(self, entries: list[Entry], tier: Tier, first: int, last: int) -> set[int]:
        """Start moving a run of pages one tier up and return the jobs that bring them, others' included."""
        start = self._plane.load if tier is Tier.HOST else self._plane.prefetch
        target = Tier.DEVICE if tier is Tier.HOST else Tier.HOST
        start(self._space, self._keys, first, last, for_whom=self._for_whom)
        job_ids = self._jobs_filling(entries[first:last], target)
        return self._join(job_ids)

    def _coming(self, key: bytes) -> set[int]:
        """Return the job that brings the first page that no tier has ready, where another request started one."""
        entry = self._plane.directory.find(self._space, key)
        return set() if entry is None else self._join(self._jobs_filling([entry], Tier.DEVICE, Tier.HOST))

    def _join(self, job_ids: set[int]) -> set[int]:
        for job_id in job_ids - self.joined:
            self._plane.flights.join(job_id, self.pins)
        self.joined |= job_ids
        return job_ids

    def _leave(self, job_id: int) -> None:
        flights = self._plane.flights
        (flights.leave if self._waits else flights.pass_by)(job_id, self.pins)

    def _brings(self, prefetch: Transfer, key: bytes) -> bool:
        entry = self._plane.directory.find(self._space, key)
        return entry is not None and self._plane.flights.job_filling(entry, Tier.HOST) == prefetch.job.id

    def _jobs_filling(self, entries: list[Entry], *tiers: Tier) -> set[int]:
        found = (self._plane.flights.job_filling(entry, tier) for entry in entries for tier in tiers)
        return {job_id for job_id in found if job_id is not None}


def _device_pages(entries: Iterable[Entry]) -> list[int]:
    return [page for entry in entries if (page := entry.page(Tier.DEVICE)) is not None]


def _leading_ready(entries: list[Entry]) -> list[Entry]:
    return list(itertools.takewhile(lambda entry: entry.is_ready(Tier.DEVICE), entries))


def run(
    acquisition: Acquisition,
    lock: threading.RLock,
    binding: Binding,
    *,
    timeout_s: float,
    layerwise: bool,
) -> list[Transfer]:
    """Step until the prefix is there or `timeout_s` passed; return the loads under way (layer-wise leases only). Pages
    from storage that are late by the prefetch policy end the prefix. Prefetches that nobody waits for when this ends,
    however it does, are cancelled as far as they have not begun; with `best_effort` they go on."""
    began = time.monotonic()
    try:
        while True:
            with lock:
                waits = acquisition.step(binding.dispatch)
            if not waits:
                return []
            if layerwise and acquisition.only_loads(waits):
                return waits
            prefetches = [transfer for transfer in waits if transfer.job.kind is JobKind.PREFETCH]
            num_pages = sum(transfer.job.num_pages for transfer in prefetches)
            patience_s = min(timeout_s, binding.prefetching.limit_s(num_pages))
            late = _first_late(waits, began, timeout_s, patience_s)
            if late is None:
                continue
            with lock:
                if late not in prefetches or time.monotonic() >= began + timeout_s:
                    acquisition.look()
                    return []
                acquisition.give_up(late)
            binding.cancel_deserted()
    finally:
        if acquisition.joined:
            with lock:
                acquisition.leave()
            binding.cancel_deserted()


def _first_late(waits: list[Transfer], began: float, timeout_s: float, patience_s: float) -> Transfer | None:
    """Wait for all of `waits`, for prefetches `patience_s` after `began`; return the first that is not done then."""
    for transfer in sorted(waits, key=lambda transfer: transfer.job.kind is JobKind.PREFETCH):
        limit_s = patience_s if transfer.job.kind is JobKind.PREFETCH else timeout_s
        try:
            transfer.result(max(0.0, began + limit_s - time.monotonic()))
        except TimeoutError:
            return transfer
    return None
