"""What jobs in flight owe the directory: pages to publish or fail in one tier, pins to give back in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from kvhoist.control.directory import Directory, Space
from kvhoist.control.entry import Entry
from kvhoist.control.jobs import Finished, JobTracker
from kvhoist.control.pins import Pins
from kvhoist.control.prefetches import Prefetches
from kvhoist.control.staging import Staging
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
    kind: JobKind
    space: Space
    entries: list[Entry]
    joined: list[Pins] = field(default_factory=list)
    deserted: bool = False  # those who wanted the pages have gone on without them
    kept: bool = False
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

    Opened jobs wait in the outbox until `take_jobs`, jobs to be cancelled until `take_cancels`.
    """

    def __init__(
        self, directory: Directory, tracker: JobTracker, *, device_owned: bool, staging: Staging | None = None
    ) -> None:
        self.counters = {kind: KindCounters() for kind in JobKind}
        self._directory = directory
        self._tracker = tracker
        self._staging = staging
        self.prefetches = Prefetches()
        self._outbox: list[Job] = []
        self._cancels: list[int] = []
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

    def take_cancels(self) -> list[int]:
        """Return the ids of jobs that the ranks are to cancel, and forget them. All of them were handed out before, or
        are by the next `take_jobs`."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def join(self, job_id: int, pins: Pins) -> None:
        """Let `pins` hold, from the moment it is ready, each page that the job fills."""
        flight = self._flights[job_id]
        flight.joined.append(pins)
        flight.deserted = False

    def leave(self, job_id: int, pins: Pins) -> None:
        """If the job is a prefetch, let `pins` wait for it no more. One that nobody waits for any more is cancelled."""
        self.pass_by(job_id, pins)
        flight = self._flights.get(job_id)
        if flight is not None and flight.deserted and not flight.kept and self._tracker.cancel(job_id):
            self._cancels.append(job_id)

    def keep(self, job_id: int) -> None:
        """Never cancel the job: its pages are wanted by one who does not join."""
        self._flights[job_id].kept = True

    def pass_by(self, job_id: int, pins: Pins | None = None) -> None:
        """A request (whose `pins` had joined) goes on without waiting for the job, which goes on, too."""
        flight = self._flights.get(job_id)
        if flight is not None and flight.kind is JobKind.PREFETCH:
            flight.joined = [joined for joined in flight.joined if joined is not pins]
            flight.deserted = not flight.joined

    def is_cancelled(self, job_id: int) -> bool:
        return job_id in self._flights and self._tracker.is_cancelled(job_id)

    def hangs(self, job_id: int) -> bool:
        """Tell whether the job has brought all that it will bring for now, and the rest hangs in storage."""
        return job_id in self._flights and self._tracker.hangs(job_id)

    def send(
        self, kind: JobKind, space: Space, entries: list[Entry], device_blocks: Sequence[int], *, stale: bool = False
    ) -> Job | None:
        """Open a job over `entries`, reserved where it fills a tier of pages; what a `stale` one does in storage counts
        for nothing. When it cannot be opened (ConfigError: blocks that do not fit, no rank left) the reservations are
        taken back."""
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
        if fills is not None and not stale:
            self._filling[fills].update(dict.fromkeys(entries, job.id))
        self._flights[job.id] = _Flight(kind, space, entries, stale=stale)
        self._outbox.append(job)
        self._follow(kind, entries)
        return job

    def is_stale(self, job_id: int) -> bool:
        return self._flights[job_id].stale

    def is_open(self, job_id: int) -> bool:
        return job_id in self._flights

    def ask(self, space: Space, chain: Sequence[bytes], first: int) -> Job:
        """Open a LOOKUP of chain[first:]."""
        job = self._tracker.open(JobKind.LOOKUP, space.namespace.digest, space.group, chain[first:])
        self._flights[job.id] = _Flight(JobKind.LOOKUP, space, [], chain=chain)
        self.num_asked += 1
        self._outbox.append(job)
        return job

    def writes(self) -> list[Job]:
        """Return the jobs that write to the storage in use."""
        jobs = [job for job in self._tracker.jobs() if job.kind is JobKind.PERSIST]
        return [job for job in jobs if not self._flights[job.id].stale]

    def forget_storage(self) -> None:
        """Book nothing of what jobs under way find or write in storage. Their pages and pins are settled as ever."""
        self._filling[Tier.STORAGE].clear()
        for flight in self._flights.values():
            flight.stale = True

    def settle(self, finished: Finished) -> list[Entry]:
        """Publish and fail what is finished of a job, give its pins back; returns the pages that reached the host."""
        job = finished.job
        flight = self._flights.pop(job.id) if finished.is_last else self._flights[job.id]
        pages = range(job.num_pages) if finished.pages is None else sorted(finished.pages)
        self.num_settled += 1
        counters = self.counters[job.kind]
        counters.jobs += finished.is_last
        counters.pages += len(pages) - len(finished.failed_pages)
        counters.failed_pages += len(finished.failed_pages)
        counters.bytes += finished.bytes
        counters.seconds += finished.seconds
        if job.kind is JobKind.LOOKUP:
            self.num_asked -= 1
            if not flight.stale:
                self._book_lookup(flight, job, finished.failed_pages)
            return []
        fills = self._tier_filled.get(job.kind)
        entries = flight.entries if finished.pages is None else [flight.entries[i] for i in pages]
        good, bad = entries, []
        if finished.failed_pages:
            good = [flight.entries[i] for i in pages if i not in finished.failed_pages]
            bad = [flight.entries[i] for i in pages if i in finished.failed_pages]
        if fills is Tier.STORAGE:
            self._book_persist(finished, flight, good, bad)
        elif fills is not None:
            filling = self._filling[fills]
            for entry in entries:
                del filling[entry]
            good = self._publish(flight, good, fills)
            if job.kind is JobKind.PREFETCH:
                self.prefetches.arrive(good, late=flight.deserted)
            if bad:
                self._fail(finished, flight, bad, fills)
        reads = self._tier_read.get(job.kind)
        if reads is not None:
            self._directory.unpin(entries, reads)
        if self._staging is not None and not flight.kept:
            self._staging.give_up(entries)
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

    def _book_persist(self, finished: Finished, flight: _Flight, good: list[Entry], bad: list[Entry]) -> None:
        if flight.stale:
            return
        filling = self._filling[Tier.STORAGE]
        for entry in (*good, *bad):
            del filling[entry]
        self._directory.set_stored(flight.space, [entry.key for entry in good], True)
        if bad:
            self._directory.note_unstored(flight.space, [entry.key for entry in bad], _why(finished))

    def _follow(self, kind: JobKind, entries: list[Entry]) -> None:
        """Tell the books of prefetches what a new job does."""
        if kind is JobKind.LOAD:
            self.prefetches.use(entries)
        elif kind in (JobKind.OFFLOAD, JobKind.PREFETCH):
            self.prefetches.refill(entries)
            if kind is JobKind.PREFETCH:
                self.prefetches.ask(entries)

    def _fail(self, finished: Finished, flight: _Flight, entries: list[Entry], tier: Tier) -> None:
        """Give pages up. Those that storage could not give are not hinted there any more; of a cancelled prefetch that
        is not known."""
        keys, reason = [entry.key for entry in entries], _why(finished)
        self._directory.fail(entries, tier, reason)
        if finished.job.kind is not JobKind.PREFETCH:
            return
        if finished.cancelled:
            self.prefetches.cancel(len(entries))
        elif not flight.stale:
            self._directory.set_stored(flight.space, keys, False, reason)

    def _book_lookup(self, flight: _Flight, job: Job, missing: frozenset[int]) -> None:
        found = min(missing, default=job.num_pages)
        first = len(flight.chain) - job.num_pages
        if found and self._directory.owns(flight.space):
            self._directory.set_stored(flight.space, flight.chain[: first + found], True, start=first)


def _why(finished: Finished) -> str:
    return f"{finished.job.kind}: {finished.error or 'no reason given'}"
