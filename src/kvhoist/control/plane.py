"""The control plane of one cache group: decides what moves, orders it, and books what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from kvhoist.control.directory import Directory, Space
from kvhoist.control.entry import Entry
from kvhoist.control.explain import Explanation
from kvhoist.control.jobs import Finished, JobTracker
from kvhoist.control.namespace import Namespace
from kvhoist.control.policy import HitCounter, WritePolicy, WriteWhen
from kvhoist.control.tiers import Tier
from kvhoist.errors import PageIdError
from kvhoist.geometry import CacheGroup
from kvhoist.messages import Completion, Job, JobKind

_FILLS = {
    JobKind.OFFLOAD: Tier.HOST,
    JobKind.LOAD: Tier.DEVICE,
    JobKind.PREFETCH: Tier.HOST,
    JobKind.PERSIST: Tier.STORAGE,
    JobKind.LOOKUP: Tier.STORAGE,
}
_READS = {JobKind.OFFLOAD: Tier.DEVICE, JobKind.LOAD: Tier.HOST, JobKind.PERSIST: Tier.HOST}
_LOOKUPS_REMEMBERED = 4096


class Pins:
    """Pins held on behalf of one owner, at most one a page and tier, given back together. Not thread-safe.

    `release` is idempotent, and final: what is added later is not pinned.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._held: dict[Tier, dict[Entry, None]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        self._released = False

    def add(self, entries: Sequence[Entry], tier: Tier) -> None:
        held = self._held[tier]
        new = [] if self._released else [entry for entry in entries if entry not in held]
        if new:
            self._directory.pin(new, tier)
            held.update(dict.fromkeys(new))

    def release(self, tiers: Sequence[Tier] = (Tier.DEVICE, Tier.HOST)) -> None:
        """Give the pins of `tiers` back; after all of them, nothing is taken any more."""
        self._released = self._released or len(tiers) == len(self._held)
        for tier in tiers:
            held, self._held[tier] = self._held[tier], {}
            if held:
                self._directory.unpin(list(held), tier)


@dataclass(slots=True)
class _Flight:
    """What a job in flight owes the directory: entries to publish or fail in one tier, pins to give back in another."""

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


class ControlPlane:
    """Decides for one cache group. One per engine, called from its scheduler; not thread-safe, never blocks.

    Methods that start a move return its Job and put it into the outbox, which the caller empties with `take_jobs` and
    hands to every rank. Each rank's Completion comes back through `complete`, which may put further jobs (a persist
    after an offload) into the outbox. A device tier that the directory has no capacity for is foreign: its blocks are
    named by the caller, who keeps them untouched until the job is finished.
    """

    def __init__(
        self,
        group: CacheGroup,
        directory: Directory,
        policy: WritePolicy,
        *,
        device_owned: bool,
        num_ranks: int = 1,
        has_storage: bool = False,
        clock: Callable[[], float],
        lookup_ttl_s: float = 1.0,
    ) -> None:
        self.group = group
        self.directory = directory
        self.policy = policy
        self.device_owned = device_owned
        self.has_storage = has_storage
        self.tracker = JobTracker(num_ranks)
        self.counters = {kind: KindCounters() for kind in JobKind}
        self._clock = clock
        self._lookup_ttl_s = lookup_ttl_s
        self._outbox: list[Job] = []
        self._flights: dict[int, _Flight] = {}
        self._filling: dict[tuple[int, Entry], int] = {}
        self._hits = HitCounter(max_keys=1 << 18)
        self._asked: dict[tuple[bytes, bytes], float] = {}

    def space(self, namespace: Namespace, group_index: int = 0) -> Space:
        return self.directory.space(namespace, group_index)

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

    # -- moves ---------------------------------------------------------------------------------------------------

    def offload(
        self,
        space: Space,
        keys: Sequence[bytes],
        start: int,
        stop: int,
        device_blocks: Sequence[int] | None = None,
        *,
        for_whom: str = "",
    ) -> Job | None:
        """Copy those of keys[start:stop] that the host tier lacks from the device; None where none is lacking or fits.

        `device_blocks` holds the blocks of keys[start:stop] on a foreign device; an owned device's are known.
        """
        if device_blocks is None:
            return self._offload_owned(space, keys, start, stop, for_whom)
        entries = self.directory.reserve(space, keys, start, stop, Tier.HOST, for_whom=for_whom)
        self._note_left_out(space, keys, start, stop)
        index = {key: i for i, key in enumerate(keys[start:stop])}
        per_page = self.group.blocks_per_page
        blocks: list[int] = []
        for entry in entries:
            first = index[entry.key] * per_page
            blocks.extend(device_blocks[first : first + per_page])
        return self._send(JobKind.OFFLOAD, space, entries, blocks)

    def write(
        self,
        space: Space,
        keys: Sequence[bytes],
        start: int,
        stop: int,
        device_blocks: Sequence[int] | None = None,
        *,
        for_whom: str = "",
    ) -> Job | None:
        """Offload what the write policy wants offloaded of keys[start:stop], ready device pages. Each call is an offer:
        for `write_through_selective`, every further one of the same page is a hit."""
        if self.policy.when is WriteWhen.WRITE_BACK:
            return None
        if self.policy.when is WriteWhen.WRITE_THROUGH_SELECTIVE:
            wanted = self._count_hits(space, keys, start, stop)
            if wanted < stop:
                reason = f"write_through_selective waits for {self.policy.min_hits} hits"
                self.directory.note_skipped(space, keys[wanted:stop], reason)
            stop = wanted
            if start >= stop:
                return None
        return self.offload(space, keys, start, stop, device_blocks, for_whom=for_whom)

    def load(
        self,
        space: Space,
        keys: Sequence[bytes],
        start: int,
        stop: int,
        device_blocks: Sequence[int] | None = None,
        *,
        for_whom: str = "",
    ) -> Job | None:
        """Copy keys[start:stop], all ready in the host tier, to the device: to `device_blocks` of a foreign one, to
        pages reserved here of an owned one (as many leading ones as fit; None where none is lacking or fits)."""
        if device_blocks is not None:
            entries = [self._ready_host(space, key) for key in keys[start:stop]]
            return self._send(JobKind.LOAD, space, entries, device_blocks)
        for key in keys[start:stop]:
            self._ready_host(space, key)
        entries = self.directory.reserve(space, keys, start, stop, Tier.DEVICE, for_whom=for_whom)
        return self._send(JobKind.LOAD, space, entries, self._owned_blocks(entries))

    def prefetch(self, space: Space, keys: Sequence[bytes], start: int, stop: int, *, for_whom: str = "") -> Job | None:
        """Read those of keys[start:stop] that the host tier lacks from storage; None where none is lacking or fits."""
        return self._send(
            JobKind.PREFETCH, space, self.directory.reserve(space, keys, start, stop, Tier.HOST, for_whom=for_whom), ()
        )

    def persist(self, space: Space, entries: Sequence[Entry]) -> Job | None:
        """Write those of `entries` that the host tier has and storage is not known to hold; None for nothing."""
        lacking = [
            entry
            for entry in entries
            if entry.is_ready(Tier.HOST)
            and not entry.is_ready(Tier.STORAGE)
            and (Tier.STORAGE, entry) not in self._filling
        ]
        return self._send(JobKind.PERSIST, space, lacking, ())

    def offload_victims(self, num_pages: int) -> list[Job]:
        """Offload those of an owned device's next `num_pages` victims that the host tier lacks (write_back)."""
        victims = self.directory.victims(Tier.DEVICE, num_pages) if num_pages > 0 else []
        jobs = []
        for branch in _branches([entry for entry in victims if entry.page(Tier.HOST) is None]):
            keys = _path(branch[0])
            job = self.offload(branch[0].space, keys, len(keys) - len(branch), len(keys), for_whom="write_back")
            jobs += [job] if job else []
        return jobs

    def lookup(self, space: Space, keys: Sequence[bytes], first: int) -> Job | None:
        """Ask storage for keys[first:], unless that was asked less than `lookup_ttl_s` ago."""
        if not self.has_storage or first >= len(keys):
            return None
        now = self._clock()
        asked = (space.namespace.digest, keys[first] + keys[-1])
        if now - self._asked.get(asked, -1e9) < self._lookup_ttl_s:
            return None
        if len(self._asked) >= _LOOKUPS_REMEMBERED:
            self._asked.clear()
        self._asked[asked] = now
        job = self.tracker.open(JobKind.LOOKUP, space.namespace.digest, space.group, keys[first:])
        self._flights[job.id] = _Flight(space, [], chain=keys)
        self._outbox.append(job)
        return job

    def commit(
        self,
        space: Space,
        keys: Sequence[bytes],
        indices: Sequence[int],
        entries: Sequence[Entry],
        *,
        for_whom: str = "",
    ) -> None:
        """Make reserved pages of an owned device, now written, ready, and let the write policy decide on them.
        `entries[j]` is the page of `keys[indices[j]]`, ascending."""
        self.directory.publish(entries, Tier.DEVICE)
        if entries:
            self.write(space, keys, indices[0], indices[-1] + 1, for_whom=for_whom)

    # -- answers -------------------------------------------------------------------------------------------------

    def complete(self, completion: Completion) -> Finished | None:
        """Book one rank's answer. With the last one the pages become ready or fail, pins go, follow-up jobs are queued,
        and the finished job is returned."""
        finished = self.tracker.complete(completion)
        if finished is not None:
            self._settle(finished)
        return finished

    def lose_rank(self, rank: int) -> list[Finished]:
        """Declare a rank dead: what it still owed has failed. Returns the jobs finished by that."""
        finished = self.tracker.lose_rank(rank)
        for one in finished:
            self._settle(one)
        return finished

    def clear(self, space: Space | None = None) -> int:
        """Forget every page (of one space, or all) and what storage was asked. Pages in use go when they are given
        back. Returns the number of pages forgotten."""
        self._asked.clear()
        return self.directory.clear(space)

    def explain(self, space: Space, keys: Sequence[bytes], num_tokens: int) -> Explanation:
        return self.directory.explain(space, keys, num_tokens, self.group.page_tokens)

    def audit(self) -> None:
        """Recount everything. Raises PageIdError naming what does not add up."""
        self.directory.audit()
        open_jobs = {job.id for job in self.tracker.jobs()}
        if open_jobs != set(self._flights) or not set(self._filling.values()) <= open_jobs:
            raise PageIdError(
                "jobs in flight and what they owe do not match",
                got=f"jobs {sorted(open_jobs)}, owed {sorted(self._flights)}",
            )

    # -- inside --------------------------------------------------------------------------------------------------

    def _settle(self, finished: Finished) -> None:
        job = finished.job
        flight = self._flights.pop(job.id)
        counters = self.counters[job.kind]
        counters.jobs += 1
        counters.pages += job.num_pages - len(finished.failed_pages)
        counters.failed_pages += len(finished.failed_pages)
        counters.bytes += finished.bytes
        counters.seconds += finished.seconds
        reason = f"{job.kind}: {finished.error or 'no reason given'}"
        if job.kind is JobKind.LOOKUP:
            self._book_lookup(flight, job, finished.failed_pages)
            return
        fills = self._tier_filled(job.kind)
        good = [entry for i, entry in enumerate(flight.entries) if i not in finished.failed_pages]
        bad = [entry for i, entry in enumerate(flight.entries) if i in finished.failed_pages]
        if fills is not None:
            for entry in flight.entries:
                del self._filling[(fills, entry)]
        if fills is Tier.STORAGE:
            self._hint(flight.space, good, True)
        elif fills is not None:
            good = self.directory.publish(good, fills)
            for pins in flight.joined:
                pins.add(good, fills)
            self.directory.fail(bad, fills, reason)
            if job.kind is JobKind.PREFETCH:
                self._hint(flight.space, bad, False, reason)
        reads = self._tier_read(job.kind)
        if reads is not None:
            self.directory.unpin(flight.entries, reads)
        if job.kind is JobKind.OFFLOAD and self.has_storage:
            self.persist(flight.space, good)

    def _send(self, kind: JobKind, space: Space, entries: list[Entry], device_blocks: Sequence[int]) -> Job | None:
        if not entries:
            return None
        host_pages = [entry.page(Tier.HOST) for entry in entries]
        job = self.tracker.open(
            kind,
            space.namespace.digest,
            space.group,
            [entry.key for entry in entries],
            [page for page in host_pages if page is not None],
            device_blocks,
        )
        reads = self._tier_read(kind)
        if reads is not None:
            self.directory.pin(entries, reads)
        fills = self._tier_filled(kind)
        if fills is not None:
            self._filling.update(dict.fromkeys(((fills, entry) for entry in entries), job.id))
        self._flights[job.id] = _Flight(space, entries)
        self._outbox.append(job)
        return job

    def _offload_owned(self, space: Space, keys: Sequence[bytes], start: int, stop: int, for_whom: str) -> Job | None:
        """Offload those of keys[start:stop] that are ready on the device, not those still being written there."""
        reserved: list[Entry] = []
        for low, high in _runs(start, stop, lambda i: self._is_ready(space, keys[i], Tier.DEVICE)):
            reserved += self.directory.reserve(space, keys, low, high, Tier.HOST, for_whom=for_whom)
            self._note_left_out(space, keys, low, high)
        return self._send(JobKind.OFFLOAD, space, reserved, self._owned_blocks(reserved))

    def _is_ready(self, space: Space, key: bytes, tier: Tier) -> bool:
        entry = self.directory.find(space, key)
        return entry is not None and entry.is_ready(tier)

    def _tier_filled(self, kind: JobKind) -> Tier | None:
        tier = _FILLS.get(kind)
        return None if tier is Tier.DEVICE and not self.device_owned else tier

    def _tier_read(self, kind: JobKind) -> Tier | None:
        tier = _READS.get(kind)
        return None if tier is Tier.DEVICE and not self.device_owned else tier

    def _owned_blocks(self, entries: Sequence[Entry]) -> list[int]:
        per_page = self.group.blocks_per_page
        pages = [entry.page(Tier.DEVICE) for entry in entries]
        return [page * per_page + i for page in pages if page is not None for i in range(per_page)]

    def _ready_host(self, space: Space, key: bytes) -> Entry:
        entry = self.directory.find(space, key)
        if entry is None or not entry.is_ready(Tier.HOST):
            raise PageIdError(
                "a page to be loaded is not ready in the host tier",
                got=key.hex(),
                remedy="Match and pin before loading.",
            )
        return entry

    def _hint(self, space: Space, entries: Sequence[Entry], stored: bool, reason: str = "") -> None:
        if entries:
            self.directory.set_stored(space, [entry.key for entry in entries], stored, reason)

    def _book_lookup(self, flight: _Flight, job: Job, missing: frozenset[int]) -> None:
        found = min(missing, default=job.num_pages)
        first = len(flight.chain) - job.num_pages
        if found:
            self.directory.set_stored(flight.space, flight.chain[: first + found], True, start=first)

    def _count_hits(self, space: Space, keys: Sequence[bytes], start: int, stop: int) -> int:
        wanted = start
        digest, group = space.namespace.digest, space.group
        for i in range(start, stop):
            hits = self._hits.add((digest, group, keys[i])) - 1
            if wanted == i and self.policy.offloads(hits):
                wanted = i + 1
        return wanted

    def _note_left_out(self, space: Space, keys: Sequence[bytes], start: int, stop: int) -> None:
        left = []
        for key in keys[start:stop]:
            entry = self.directory.find(space, key)
            if entry is None or entry.page(Tier.HOST) is None:
                left.append(key)
        if left:
            self.directory.note_skipped(space, left, "the host tier had no page to give: all are pinned or in flight")


def _runs(start: int, stop: int, wanted: Callable[[int], bool]) -> list[tuple[int, int]]:
    """Return the maximal runs (first, last + 1) of start..stop whose members are all wanted."""
    runs: list[tuple[int, int]] = []
    for i in range(start, stop):
        if wanted(i):
            if runs and runs[-1][1] == i:
                runs[-1] = (runs[-1][0], i + 1)
            else:
                runs.append((i, i + 1))
    return runs


def _path(entry: Entry) -> list[bytes]:
    """Return the keys from the first page of the entry's chain to its own."""
    keys: list[bytes] = []
    node: Entry | None = entry
    while node is not None:
        keys.append(node.key)
        node = node.parent
    return keys[::-1]


def _branches(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Cut entries, children before parents, into runs in which each is the parent of the one before."""
    branches: list[list[Entry]] = []
    for entry in entries:
        if branches and branches[-1][-1].parent is entry:
            branches[-1].append(entry)
        else:
            branches.append([entry])
    return branches
