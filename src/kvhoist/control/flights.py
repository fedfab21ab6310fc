"""What jobs in flight owe the directory: pages to publish or fail in one tier, pins to give back in another."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from kvhoist.control.directory import Directory, Space
from kvhoist.control.entry import Entry
from kvhoist.control.jobs import Finished, JobTracker
from kvhoist.control.pins import Pins
from kvhoist.control.tiers import Tier
from kvhoist.errors import PageIdError
from kvhoist.messages import Job, JobKind

_FILLS = {
    JobKind.OFFLOAD: Tier.HOST,
    JobKind.LOAD: Tier.DEVICE,
    JobKind.PREFETCH: Tier.HOST,
    JobKind.PERSIST: Tier.STORAGE,
    JobKind.LOOKUP: Tier.STORAGE,
}
_READS = {JobKind.OFFLOAD: Tier.DEVICE, JobKind.LOAD: Tier.HOST, JobKind.PERSIST: Tier.HOST}


@dataclass(slots=True)
class _Flight:
    space: Space
    entries: list[Entry]
    joined: list[Pins] = field(default_factory=list)
    chain: Sequence[bytes] = ()  # of a LOOKUP: the whole chain, whose tail was asked for


@dataclass(slots=True)
class KindCounters:
    """What the finished jobs of one kind did."""

    jobs: int = 0
    pages: int = 0
    failed_pages: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


class Flights:
    """Opens jobs over reserved or ready entries and settles them when every rank has answered. Not thread-safe.

    Opened jobs wait in the outbox until `take_jobs`.
    """

    def __init__(self, directory: Directory, tracker: JobTracker, *, device_owned: bool) -> None:
        self.counters = {kind: KindCounters() for kind in JobKind}
        self._directory = directory
        self._tracker = tracker
        self._device_owned = device_owned
        self._outbox: list[Job] = []
        self._flights: dict[int, _Flight] = {}
        self._filling: dict[tuple[Tier, Entry], int] = {}
        self.num_asked = 0
        self.num_settled = 0

    def take_jobs(self) -> list[Job]:
        """Return the jobs not yet handed to the ranks, oldest first, and forget them."""
        jobs, self._outbox = self._outbox, []
        return jobs

    def job_filling(self, entry: Entry, tier: Tier) -> int | None:
        """Return the id of the job that fills `entry` in `tier`, else None."""
        return self._filling.get((tier, entry))

    def join(self, job_id: int, pins: Pins) -> None:
        """Let `pins` hold, from the moment it is ready, each page that the job fills."""
        self._flights[job_id].joined.append(pins)

    def send(self, kind: JobKind, space: Space, entries: list[Entry], device_blocks: Sequence[int]) -> Job | None:
        """Open a job over `entries`, reserved where it fills a tier of pages. When it cannot be opened (ConfigError:
        blocks that do not fit, no rank left) the reservations are taken back."""
        if not entries:
            return None
        host_pages = [entry.page(Tier.HOST) for entry in entries]
        reads, fills = self._tier_read(kind), self._tier_filled(kind)
        with contextlib.ExitStack() as undo:
            if fills is not None and fills is not Tier.STORAGE:
                undo.callback(self._directory.fail, entries, fills, f"{kind}: the job could not be opened")
            if reads is not None:
                self._directory.pin(entries, reads)
                undo.callback(self._directory.unpin, entries, reads)
            job = self._tracker.open(
                kind,
                space.namespace.digest,
                space.group,
                [entry.key for entry in entries],
                [page for page in host_pages if page is not None],
                device_blocks,
            )
            undo.pop_all()
        if fills is not None:
            self._filling.update(dict.fromkeys(((fills, entry) for entry in entries), job.id))
        self._flights[job.id] = _Flight(space, entries)
        self._outbox.append(job)
        return job

    def is_open(self, job_id: int) -> bool:
        return job_id in self._flights

    def ask(self, space: Space, chain: Sequence[bytes], first: int) -> Job:
        """Open a LOOKUP of chain[first:]."""
        job = self._tracker.open(JobKind.LOOKUP, space.namespace.digest, space.group, chain[first:])
        self._flights[job.id] = _Flight(space, [], chain=chain)
        self.num_asked += 1
        self._outbox.append(job)
        return job

    def settle(self, finished: Finished) -> list[Entry]:
        """Publish and fail what the job filled, give its pins back, and return the pages that reached the host."""
        job = finished.job
        flight = self._flights.pop(job.id)
        self.num_settled += 1
        counters = self.counters[job.kind]
        counters.jobs += 1
        counters.pages += job.num_pages - len(finished.failed_pages)
        counters.failed_pages += len(finished.failed_pages)
        counters.bytes += finished.bytes
        counters.seconds += finished.seconds
        reason = f"{job.kind}: {finished.error or 'no reason given'}"
        if job.kind is JobKind.LOOKUP:
            self.num_asked -= 1
            self._book_lookup(flight, job, finished.failed_pages)
            return []
        fills = self._tier_filled(job.kind)
        good = [entry for i, entry in enumerate(flight.entries) if i not in finished.failed_pages]
        bad = [entry for i, entry in enumerate(flight.entries) if i in finished.failed_pages]
        bad_keys = [entry.key for entry in bad]
        if fills is not None:
            for entry in flight.entries:
                del self._filling[(fills, entry)]
        if fills is Tier.STORAGE:
            self._directory.set_stored(flight.space, [entry.key for entry in good], True)
        elif fills is not None:
            cleared = self._directory.complete_cleared(good, fills) if flight.joined else []
            good = self._directory.publish([e for e in good if e not in cleared] if cleared else good, fills)
            for pins in flight.joined:
                pins.add(good + cleared, fills)
            self._directory.unpin(cleared, fills)
            self._directory.fail(bad, fills, reason)
            if job.kind is JobKind.PREFETCH and bad_keys:
                self._directory.set_stored(flight.space, bad_keys, False, reason)
        reads = self._tier_read(job.kind)
        if reads is not None:
            self._directory.unpin(flight.entries, reads)
        return good if fills is Tier.HOST else []

    def audit(self) -> None:
        """Raise PageIdError unless exactly the open jobs owe something."""
        open_jobs = {job.id for job in self._tracker.jobs()}
        if open_jobs != set(self._flights) or not set(self._filling.values()) <= open_jobs:
            raise PageIdError(
                "jobs in flight and what they owe do not match",
                got=f"jobs {sorted(open_jobs)}, owed {sorted(self._flights)}",
            )

    def _tier_filled(self, kind: JobKind) -> Tier | None:
        tier = _FILLS.get(kind)
        return None if tier is Tier.DEVICE and not self._device_owned else tier

    def _tier_read(self, kind: JobKind) -> Tier | None:
        tier = _READS.get(kind)
        return None if tier is Tier.DEVICE and not self._device_owned else tier

    def _book_lookup(self, flight: _Flight, job: Job, missing: frozenset[int]) -> None:
        found = min(missing, default=job.num_pages)
        first = len(flight.chain) - job.num_pages
        if found and self._directory.owns(flight.space):
            self._directory.set_stored(flight.space, flight.chain[: first + found], True, start=first)
