"""What jobs in flight owe the directory: pages to publish or fail in one tier, pins to give back in another."""

from __future__ import annotations

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
    stale: bool = False  # storage was given up since: what it did there counts for nothing


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
        self._outbox: list[Job] = []
        self._flights: dict[int, _Flight] = {}
        self._filling: dict[Tier, dict[Entry, int]] = {tier: {} for tier in Tier}
        owned = [tier for tier in Tier if device_owned or tier is not Tier.DEVICE]
        self._tier_filled = {kind: tier for kind, tier in _FILLS.items() if tier in owned}
        self._tier_read = {kind: tier for kind, tier in _READS.items() if tier in owned}
        self.num_asked = 0
        self.num_settled = 0

    def take_jobs(self) -> list[Job]:
        """Return the jobs not yet handed to the ranks, oldest first, and forget them."""
        jobs, self._outbox = self._outbox, []
        return jobs

    def job_filling(self, entry: Entry, tier: Tier) -> int | None:
        """Return the id of the job that fills `entry` in `tier`, else None."""
        return self._filling[tier].get(entry)

    def join(self, job_id: int, pins: Pins) -> None:
        """Let `pins` hold, from the moment it is ready, each page that the job fills."""
        self._flights[job_id].joined.append(pins)

    def is_only_for(self, job_id: int, pins: Pins) -> bool:
        """Tell whether the job is under way, and joined by `pins` alone."""
        return job_id in self._flights and all(joined is pins for joined in self._flights[job_id].joined)

    def send(self, kind: JobKind, space: Space, entries: list[Entry], device_blocks: Sequence[int]) -> Job | None:
        """Open a job over `entries`, reserved where it fills a tier of pages. When it cannot be opened (ConfigError:
        blocks that do not fit, no rank left) the reservations are taken back."""
        if not entries:
            return None
        reads, fills = self._tier_read.get(kind), self._tier_filled.get(kind)
        pinned = False
        try:
            if reads is not None:
                self._directory.pin(entries, reads)
                pinned = True
            page_of_row = space.columns[Tier.HOST]
            job = self._tracker.open(
                kind,
                space.namespace.digest,
                space.group,
                [entry.key for entry in entries],
                [page_of_row[entry.row] for entry in entries],
                device_blocks,
            )
        except BaseException:
            if pinned and reads is not None:
                self._directory.unpin(entries, reads)
            if fills is not None and fills is not Tier.STORAGE:
                self._directory.fail(entries, fills, f"{kind}: the job could not be opened")
            raise
        if fills is not None:
            self._filling[fills].update(dict.fromkeys(entries, job.id))
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

    def forget_storage(self) -> None:
        """Book nothing of what jobs under way find or write in storage. Their pages and pins are settled as ever."""
        self._filling[Tier.STORAGE].clear()
        for flight in self._flights.values():
            flight.stale = True

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
        if job.kind is JobKind.LOOKUP:
            self.num_asked -= 1
            if not flight.stale:
                self._book_lookup(flight, job, finished.failed_pages)
            return []
        fills = self._tier_filled.get(job.kind)
        good, bad = flight.entries, []
        if finished.failed_pages:
            good = [entry for i, entry in enumerate(flight.entries) if i not in finished.failed_pages]
            bad = [entry for i, entry in enumerate(flight.entries) if i in finished.failed_pages]
        if fills is Tier.STORAGE:
            self._book_persist(flight, good)
        elif fills is not None:
            filling = self._filling[fills]
            for entry in flight.entries:
                del filling[entry]
            good = self._publish(flight, good, fills)
            if bad:
                self._fail(job, flight, bad, fills, f"{job.kind}: {finished.error or 'no reason given'}")
        reads = self._tier_read.get(job.kind)
        if reads is not None:
            self._directory.unpin(flight.entries, reads)
        return good if fills is Tier.HOST else []

    def audit(self) -> None:
        """Raise PageIdError unless exactly the open jobs owe something."""
        open_jobs = {job.id for job in self._tracker.jobs()}
        owing = {job_id for filling in self._filling.values() for job_id in filling.values()}
        if open_jobs != set(self._flights) or not owing <= open_jobs:
            raise PageIdError(
                "jobs in flight and what they owe do not match",
                got=f"jobs {sorted(open_jobs)}, owed {sorted(self._flights)}",
            )

    def _publish(self, flight: _Flight, entries: list[Entry], tier: Tier) -> list[Entry]:
        """Make pages ready and let those who joined the job hold them. Returns those that can be found."""
        if not flight.joined:
            return self._directory.publish(entries, tier)
        cleared = self._directory.complete_cleared(entries, tier)
        published = self._directory.publish([e for e in entries if e not in cleared] if cleared else entries, tier)
        for pins in flight.joined:
            pins.add(published + cleared, tier)
        self._directory.unpin(cleared, tier)
        return published

    def _book_persist(self, flight: _Flight, good: list[Entry]) -> None:
        if not flight.stale:
            filling = self._filling[Tier.STORAGE]
            for entry in flight.entries:
                del filling[entry]
            self._directory.set_stored(flight.space, [entry.key for entry in good], True)

    def _fail(self, job: Job, flight: _Flight, entries: list[Entry], tier: Tier, reason: str) -> None:
        """Give pages up; those that storage could not give are not hinted there any more."""
        keys = [entry.key for entry in entries]
        self._directory.fail(entries, tier, reason)
        if job.kind is JobKind.PREFETCH and not flight.stale:
            self._directory.set_stored(flight.space, keys, False, reason)

    def _book_lookup(self, flight: _Flight, job: Job, missing: frozenset[int]) -> None:
        found = min(missing, default=job.num_pages)
        first = len(flight.chain) - job.num_pages
        if found and self._directory.owns(flight.space):
            self._directory.set_stored(flight.space, flight.chain[: first + found], True, start=first)
