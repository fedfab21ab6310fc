"""The control plane of one cache group: decides what moves, orders it, and books what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvhoist.control.directory import Directory, Space
from kvhoist.control.entry import Entry
from kvhoist.control.explain import Explanation
from kvhoist.control.flights import Flights
from kvhoist.control.jobs import Finished, JobTracker
from kvhoist.control.lookups import Lookups
from kvhoist.control.namespace import Namespace
from kvhoist.control.offers import Offer, Offers
from kvhoist.control.paths import runs
from kvhoist.control.pins import Pins
from kvhoist.control.policy import WritePolicy
from kvhoist.control.prefetches import PrefetchStats
from kvhoist.control.staging import Staging, check_staging
from kvhoist.control.tiers import READY, Tier
from kvhoist.errors import PageIdError
from kvhoist.geometry import CacheGroup
from kvhoist.messages import Completion, Job, JobKind


class ControlPlane:
    """Decides for one cache group. One per engine, called from its scheduler; not thread-safe, never blocks.

    Methods that start a move return its Job and put it into the outbox, which the caller empties with `take_jobs` and
    hands to every rank. Each rank's Completion comes back through `complete`, which may put further jobs (a persist
    after an offload) into the outbox. A device tier that the directory has no capacity for is foreign: its blocks are
    named by the caller, who keeps them untouched until the job is finished. Without `persists` storage is only read.
    With a `host_retain` of 0 the host tier is staging only: what storage has is given up there, and not offloaded. With
    `early_persist` ranks begin to write pages to storage before they are told to.
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
        persists: bool = True,
        host_retain: int | None = None,
        early_persist: bool = False,
        clock: Callable[[], float],
        lookup_ttl_s: float = 1.0,
    ) -> None:
        self.group = group
        self.directory = directory
        self.policy = policy
        self.has_storage = has_storage
        self.persists = has_storage and persists
        self.tracker = JobTracker(num_ranks)
        self._host_retain, self._early_persist = host_retain, early_persist
        self._staging = Staging(directory) if host_retain == 0 else None
        self.flights = Flights(directory, self.tracker, device_owned=device_owned, staging=self._staging)
        self._offers = Offers(directory, policy, group.blocks_per_page)
        self.lookups = Lookups(self.flights, clock, lookup_ttl_s)
        self._catches_up = False

    def space(self, namespace: Namespace, group_index: int = 0) -> Space:
        return self.directory.space(namespace, group_index)

    def pins(self) -> Pins:
        return Pins(self.directory, self._staging)

    def take_jobs(self) -> list[Job]:
        """Return the jobs not yet handed to the ranks, oldest first, and forget them."""
        return self.flights.take_jobs()

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
        return self._offload_foreign(space, [Offer(keys, start, stop, device_blocks, for_whom)])

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
        stop = self._offers.wanted(space, keys, start, stop)
        return self.offload(space, keys, start, stop, device_blocks, for_whom=for_whom) if start < stop else None

    def write_all(self, space: Space, offers: Sequence[Offer]) -> Job | None:
        """As `write`, for pages of several requests on a foreign device: one job for all of them."""
        wanted = []
        for offer in offers:
            stop = self._offers.wanted(space, offer.keys, offer.start, offer.stop)
            if offer.start < stop:
                wanted.append(offer if stop == offer.stop else offer._replace(stop=stop))
        self._offers.make_room(space, wanted)
        return self._offload_foreign(space, wanted)

    def write_left_out(self, space: Space, keys: Sequence[bytes], stop: int, *, for_whom: str = "") -> list[Job]:
        """Offload those of keys[:stop], ready on an owned device, for which an earlier offload found no room."""
        lacking = self._offers.take_left_out(keys, stop)
        jobs = [self.offload(space, keys, low, high, for_whom=for_whom) for low, high in lacking]
        return [job for job in jobs if job is not None]

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
        """Copy keys[start:stop], all ready in the host tier, to `device_blocks` of a foreign device, to pages reserved
        here of an owned one (as many leading ones as fit; None where none is lacking or fits)."""
        if device_blocks is not None:
            path = self.directory.chain(space, keys, 0, stop)
            entries, host = path[start:], READY[Tier.HOST]
            if len(entries) < stop - start or not all(entry.flags & host for entry in entries):
                entries = [self._ready_host(space, key) for key in keys[start:stop]]
            self.directory.touch(path)
            if self._catches_up:
                self.persist(path)
            return self.flights.send(JobKind.LOAD, space, entries, device_blocks)
        for key in keys[start:stop]:
            self._ready_host(space, key)
        entries = self.directory.reserve(space, keys, start, stop, Tier.DEVICE, for_whom=for_whom)
        return self.flights.send(JobKind.LOAD, space, entries, self._owned_blocks(entries))

    def prefetch(self, space: Space, keys: Sequence[bytes], start: int, stop: int, *, for_whom: str = "") -> Job | None:
        """Read those of keys[start:stop] that the host tier lacks from storage; None for nothing or without storage."""
        if not self.has_storage:
            return None
        entries = self.directory.reserve(space, keys, start, stop, Tier.HOST, for_whom=for_whom)
        return self.flights.send(JobKind.PREFETCH, space, entries, ())

    def persist(self, entries: Sequence[Entry]) -> Job | None:
        """Write those of `entries` that the host tier has and storage is not known to hold; None for nothing."""
        host, host_and_storage = READY[Tier.HOST], READY[Tier.HOST] | READY[Tier.STORAGE]
        # What was cleared while its owner holds it is found no more, and not persisted.
        lacking = [
            entry
            for entry in entries
            if entry.flags & host_and_storage == host
            and self.flights.job_filling(entry, Tier.STORAGE) is None
            and self.directory.find(entry.space, entry.key) is entry
        ]
        return self.flights.send(JobKind.PERSIST, lacking[0].space, lacking, ()) if lacking else None

    def lookup(self, space: Space, keys: Sequence[bytes], first: int, *, again: bool = False) -> Job | None:
        """Ask storage for keys[first:], unless that was asked less than `lookup_ttl_s` ago (`again`: all the same) or
        was not answered yet."""
        return self.lookups.ask(space, keys, first, again=again) if self.has_storage else None

    def commit(
        self,
        space: Space,
        keys: Sequence[bytes],
        indices: Sequence[int],
        entries: Sequence[Entry],
        *,
        for_whom: str = "",
    ) -> None:
        """Make reserved pages of an owned device, now written, ready, and let the write policy decide on them. Page
        `entries[j]` is that of `keys[indices[j]]`, ascending."""
        self.directory.publish(entries, Tier.DEVICE)
        if entries:
            self.write(space, keys, indices[0], indices[-1] + 1, for_whom=for_whom)

    # -- answers -------------------------------------------------------------------------------------------------

    def complete(self, completion: Completion) -> Finished | None:
        """Book one rank's answer. With the last one the pages become ready or fail, pins go, follow-up jobs are queued,
        and the finished job is returned."""
        if (finished := self.tracker.complete(completion)) is not None:
            self._settle(finished)
        return finished

    def lose_rank(self, rank: int) -> list[Finished]:
        """Declare a rank dead: what it still owed has failed. Returns the jobs finished by that."""
        finished = self.tracker.lose_rank(rank)
        for one in finished:
            self._settle(one)
        return finished

    def restore_rank(self, rank: int) -> int:
        """Count on a rank again that came back with empty memory: what it still owed has failed, and every page is
        forgotten as by `clear`, one in use too. Returns the number of pages forgotten."""
        self.lose_rank(rank)
        self.tracker.restore_rank(rank)
        return self.clear()

    def clear(self, space: Space | None = None) -> int:
        """Forget every page (of one space, or all; those in use when they are given back); returns their number."""
        self.lookups.forget()
        return self.directory.clear(space)

    def attach_storage(self, *, persists: bool) -> None:
        """Use storage, of which nothing is known yet; with `persists` write what the host tier holds as it is hit. Not
        before `directory.drop_hints` has left none. Raises ConfigError (host tier staging only, not `persists`)."""
        check_staging(self._host_retain, persists=persists)
        self.has_storage, self.persists, self._catches_up = True, persists, persists

    def detach_storage(self) -> None:
        """Use storage no more; jobs under way tell nothing of it. Its hints go by `directory.drop_hints`."""
        self.has_storage = self.persists = self._catches_up = False
        self.lookups.forget()
        self.flights.forget_storage()

    def explain(self, space: Space, keys: Sequence[bytes], num_tokens: int) -> Explanation:
        explanation = self.directory.explain(space, keys, num_tokens, self.group.page_tokens)
        return explanation if self.has_storage else replace(explanation, has_storage=False)

    def prefetch_stats(self, most_looks: int = 4096) -> PrefetchStats:
        """Return what prefetches were good for; see `Prefetches.stats`."""
        return self.flights.prefetches.stats(self.group.page_bytes * self.tracker.num_ranks, most_looks)

    def audit(self) -> None:
        """Recount everything. Raises PageIdError naming what does not add up."""
        self.directory.audit()
        self.flights.audit()

    # -- inside --------------------------------------------------------------------------------------------------

    def _settle(self, finished: Finished) -> None:
        early = self._early_persist and finished.job.kind is JobKind.OFFLOAD and self.flights.is_stale(finished.job.id)
        arrived = self.flights.settle(finished)
        if self.persists:
            self.persist(arrived)
        elif early and arrived:  # ranks may have begun to write them: pinned until that has ended
            self.flights.send(JobKind.PERSIST, arrived[0].space, arrived, (), stale=True)

    def _offload_foreign(self, space: Space, offers: Sequence[Offer]) -> Job | None:
        entries: list[Entry] = []
        blocks: list[int] = []
        try:
            for offer in offers if self._staging is None else self._offers.unstored(space, offers):
                reserved, read = self._offers.reserve(space, offer)
                entries += reserved
                blocks += read
        except BaseException:
            self.directory.fail(entries, Tier.HOST, "offload: room for other pages could not be made")
            raise
        return self.flights.send(JobKind.OFFLOAD, space, entries, blocks)

    def _offload_owned(self, space: Space, keys: Sequence[bytes], start: int, stop: int, for_whom: str) -> Job | None:
        """Offload those of keys[start:stop] that are ready on the device, not those still being written there."""
        reserved: list[Entry] = []
        try:
            for low, high in runs(start, stop, lambda i: self._may_offload(space, keys[i])):
                reserved += self.directory.reserve(space, keys, low, high, Tier.HOST, for_whom=for_whom)
                self._offers.note_left_out(space, keys, low, high)
        except BaseException:
            self.directory.fail(reserved, Tier.HOST, "offload: room for later pages could not be made")
            raise
        return self.flights.send(JobKind.OFFLOAD, space, reserved, self._owned_blocks(reserved))

    def _may_offload(self, space: Space, key: bytes) -> bool:
        entry = self.directory.find(space, key)
        if entry is None or not entry.is_ready(Tier.DEVICE):
            return False
        return self._staging is None or not entry.is_ready(Tier.STORAGE)

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
                remedy="Prefetch what only storage holds, wait for it, and pin the match meanwhile.",
            )
        return entry
