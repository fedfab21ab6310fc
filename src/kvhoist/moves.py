"""The moves and the upkeep that a cache offers tier by tier."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvhoist.binding import Binding
from kvhoist.checks import count, seconds, whole_numbers
from kvhoist.config import CacheConfig
from kvhoist.control.directory import Space
from kvhoist.control.directory_events import Event as DirectoryEvent
from kvhoist.control.namespace import Namespace
from kvhoist.control.pins import Pins
from kvhoist.control.policy import WriteWhen
from kvhoist.control.tiers import Tier
from kvhoist.control.write_back import num_unsafe, offload_victims
from kvhoist.errors import ConfigError, PolicyError, StoreUnavailableError
from kvhoist.geometry import CacheGroup
from kvhoist.lease import Lease, Match
from kvhoist.messages import Job
from kvhoist.platform.base import Event
from kvhoist.stats import DetachReport
from kvhoist.storage.base import Store
from kvhoist.transfer import Transfer

_log = logging.getLogger(__name__)


class TierMoves:
    """What `HierarchicalCache` does when told which tier: the half of it that knows nothing of tokens."""

    def __init__(self, binding: Binding, config: CacheConfig, group: CacheGroup, *, disabled: bool) -> None:
        self.config = config
        self.group = group
        self._binding = binding
        self._lock = binding.lock
        self._plane = binding.plane
        self._disabled = disabled
        if self._disabled:
            _log.warning("KVHOIST_DISABLE is set: every look-up is a miss and nothing is kept")

    # -- moves, tier by tier ---------------------------------------------------------------------------------------

    def offload(
        self, match: Match, device_blocks: Sequence[int] | None = None, *, first: int = 0, after: Event | None = None
    ) -> Transfer | None:
        """Copy to the host tier what it lacks of the match's pages from `first` on, whatever the write policy says.

        On a foreign device `device_blocks` names the blocks of these pages, which the engine leaves alone until the
        transfer is done; on an owned one the pages that are ready there are taken. The copy begins after the event
        `after`. None where nothing is lacking or the host tier has no room.
        """
        if self._disabled:
            return None
        if device_blocks is None and self.config.device_owned:
            blocks, first, stop = None, count("first", first, most=len(match.keys)), len(match.keys)
        else:
            blocks, first, stop = self._named(match, device_blocks, first)
        with self._lock:
            self._check(match)
            return self._start(self._plane.offload(match.space, match.keys, first, stop, blocks), after)

    def write(
        self, match: Match, device_blocks: Sequence[int], *, first: int = 0, after: Event | None = None
    ) -> Transfer | None:
        """Offer freshly computed pages of a foreign device to the write policy: as `offload`, where it says so."""
        if self._disabled:
            return None
        blocks, first, stop = self._named(match, device_blocks, first)
        with self._lock:
            self._check(match)
            return self._start(self._plane.write(match.space, match.keys, first, stop, blocks), after)

    def load(
        self, match: Match, device_blocks: Sequence[int], *, first: int = 0, after: Event | None = None
    ) -> Transfer | None:
        """Copy pages from `first` on, ready in the host tier, to the blocks of a foreign device, which belong to the
        transfer until it is done. An owned device uses `acquire`. Raises PageIdError for a page that is not ready, and,
        as `offload` and `write` do, ConfigError for blocks that are not whole pages, repeat, or do not exist."""
        if self._disabled:
            return None
        blocks, first, stop = self._named(match, device_blocks, first)
        with self._lock:
            self._check(match)
            return self._start(self._plane.load(match.space, match.keys, first, stop, blocks), after)

    def prefetch(self, match: Match) -> Transfer | None:
        """Bring those of the match's pages that only storage holds to the host tier, verified; None where none is."""
        with self._lock:
            self._check(match)
            entries = self._plane.directory.match(match.space, match.keys)
            lacking = [i for i, e in enumerate(entries) if not (e.is_ready(Tier.DEVICE) or e.is_ready(Tier.HOST))]
            if not lacking:
                return None
            job = self._plane.prefetch(match.space, match.keys, lacking[0], lacking[-1] + 1)
            if job is not None:
                self._plane.flights.keep(job.id)
            return self._start(job)

    def persist(self, match: Match) -> Transfer | None:
        """Write to storage what the host tier has of the match and storage is not known to hold; None for nothing."""
        with self._lock:
            self._check(match)
            entries = self._plane.directory.match(match.space, match.keys)
            return self._start(self._plane.persist(entries) if self._plane.persists else None)

    # -- upkeep ----------------------------------------------------------------------------------------------------

    def pin(self, match: Match) -> Pins:
        """Forbid the tiers to evict what they hold now of the matched pages, until `unpin`."""
        pins = self._plane.pins()
        with self._lock:
            self._check(match)
            entries = self._plane.directory.match(match.space, match.keys)
            for tier in (Tier.DEVICE, Tier.HOST):
                pins.add([entry for entry in entries if entry.is_ready(tier)], tier)
        return pins

    def unpin(self, pins: Pins) -> None:
        """Give back what `pin` returned. Idempotent."""
        with self._lock:
            pins.release()

    def evict(self, tier: str, num_pages: int) -> int:
        """Give up `num_pages` pages of `"host"` (or of an owned `"device"`) by the eviction policy; returns how many
        went: pinned ones stay. Under `write_back` device pages are offloaded first. Raises PolicyError, ConfigError."""
        chosen = {"device": Tier.DEVICE, "host": Tier.HOST}.get(tier) if isinstance(tier, str) else None
        num_pages = count("num_pages", num_pages)
        if chosen is None:
            raise PolicyError("no such tier to evict from", got=repr(tier), choices=["device", "host"])
        if chosen is Tier.DEVICE:
            self._need_owned("evict")
            self._clean(num_pages, room=0)
        with self._lock:
            self._binding.check_open()
            return len(self._plane.directory.evict(chosen, num_pages, for_whom="evict()"))

    def clear(self, namespace: Namespace | None = None, *, storage: bool = False) -> int:
        """Forget every page (of one namespace, or all) in device and host; pages in use go when they are given back.
        With `storage` remove them from the store too, for whoever shares it; pages on their way there are awaited or
        cancelled first. Returns the number of pages forgotten. Raises StoreUnavailableError where that took longer than
        `acquire_timeout_s`, StorageError."""
        if namespace is not None and not isinstance(namespace, Namespace):
            raise ConfigError("this is no namespace", got=type(namespace).__name__, expected="a Namespace, or None")
        with self._lock:
            self._binding.check_open()
            num_pages = self._plane.clear(self._plane.space(namespace) if namespace else None)
            late = self._plane.flights.writes()
            attached = self._binding.slot.current
        if storage and attached is not None:
            store = attached.store
            late = [job for job in late if namespace is None or job.namespace == namespace.digest]
            for job in late:
                self._binding.mover.cancel(job.id)
            settled = self._binding.wait(late, self.config.acquire_timeout_s)
            for digest in [namespace.digest] if namespace else list(store.namespaces()):
                store.remove_namespace(digest)
            if not settled:
                raise StoreUnavailableError(
                    "pages were still being written to the store when it was cleared",
                    got=f"{len(late)} jobs not done after {self.config.acquire_timeout_s} s",
                    remedy="Call clear(storage=True) again when the store answers.",
                )
        return num_pages

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Offload what `write_back` still holds back, and wait until nothing is under way; False after `timeout_s`."""
        deadline = time.monotonic() + seconds("timeout_s", timeout_s)
        with self._lock:
            self._binding.check_caller()
        left = None
        while not self._binding.forked:
            self._clean(self._binding.num_device_pages, room=0, until=deadline)
            if not self._binding.flush(max(0.0, deadline - time.monotonic())):
                return False
            with self._lock:
                before, left = left, num_unsafe(self._plane)
            if not left or left == before:  # none, or what is left finds no room: a prefix longer than the host tier
                break
        return True

    def attach_store(self, store: Store | str) -> None:
        """Use a store (or the store at an address) from now on, as if the cache had been built with it. Opening it may
        take long, and holds up nobody but the caller. It begins with nothing known: what it holds is found as requests
        ask for it, and what the host tier holds is written to it as it is hit.

        Raises StorageError where a store is attached already or another attach or detach is under way, ClosedError, and
        what opening the store raises; nothing has changed then.
        """
        self._binding.attach_store(store)

    def detach_store(self, *, drain: bool = True, timeout_s: float = 60.0) -> DetachReport:
        """Use no store from now on. Pages on their way there are finished, or cancelled where that takes longer than
        `timeout_s` or `drain` is False; requests that wait for pages from it compute them. A store that was opened from
        an address is closed. Where one of its calls hangs, the pages that it reads or writes stay pinned, and the
        store open, until it returns: the report says so, and the cache goes on.

        Raises StorageError where none is attached or another attach or detach is under way, ClosedError, ConfigError.
        """
        return self._binding.detach_store(drain=drain, timeout_s=seconds("timeout_s", timeout_s))

    def subscribe(self, callback: Callable[[DirectoryEvent], None]) -> Callable[[], None]:
        """Call `callback` for pages stored in or removed from a tier (under the cache's lock: be quick, call nothing
        of the cache, which refuses it); returns the call that ends it."""
        if not callable(callback):
            raise ConfigError("a subscriber must be callable", got=repr(callback))
        with self._lock:
            return self._plane.directory.subscribe(callback)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check(self, match: Match) -> None:
        """Raise ClosedError, or ConfigError for a match that another cache made: its pages have other places here."""
        self._binding.check_open()
        if not isinstance(match, Match) or not self._plane.directory.owns(match.space):
            raise ConfigError("this is no match of this cache", got=repr(match), remedy="Call match() of this cache.")

    def _nearest(self, space: Space, keys: Sequence[bytes]) -> list[Tier]:
        """Return the nearest tier of each page of the longest prefix held. With the lock held."""
        entries = self._plane.directory.match(space, keys)
        return [next(tier for tier in Tier if entry.is_ready(tier)) for entry in entries]

    def _asking(self, space: Space, keys: Sequence[bytes], first: int) -> Transfer | None:
        """Ask storage for keys[first:], or join who asked already. With the lock held."""
        transfer = self._start(self._plane.lookup(space, keys, first))
        under_way = self._plane.lookups.under_way(space, keys, first)
        return transfer or (None if under_way is None else self._binding.transfers.get(under_way))

    def _check_prefix(self, lease: Lease, keys: Sequence[bytes], namespace: Namespace | None) -> None:
        """Raise ConfigError unless pages after `lease` can be pages of `keys`."""
        match, num_pages = lease.match, min(lease.num_pages, len(keys))
        with self._lock:
            self._check(match)
        if list(match.keys[:num_pages]) != list(keys[:num_pages]) or namespace not in (None, match.space.namespace):
            raise ConfigError(
                "the lease is of other tokens, or of another salt or namespace",
                remedy="Give reserve() what match() was given, or no lease.",
            )

    def _named(self, match: Match, device_blocks: Sequence[int] | None, first: int) -> tuple[list[int], int, int]:
        """Return blocks, first page and one past the last, as the caller named them, once all of them can be meant."""
        if self.config.device_owned:
            raise PolicyError("kvhoist gives out the blocks of this device itself", remedy="Use acquire and reserve.")
        first = count("first", first, most=len(match.keys))
        blocks = whole_numbers(device_blocks)
        num_pages, rest = divmod(len(blocks or ()), self.group.blocks_per_page)
        fits = blocks is not None and not rest and first + num_pages <= len(match.keys)
        known = all(0 <= block < self._binding.num_device_blocks for block in blocks or ())
        if blocks is None or not fits or not known or len(set(blocks)) < len(blocks):
            raise ConfigError(
                "these device blocks cannot hold pages of the match",
                got=f"blocks from page {first} on: {str(device_blocks)[:80]}",
                expected=f"{self.group.blocks_per_page} blocks a page for at most {len(match.keys)} pages, "
                f"each id once and below {self._binding.num_device_blocks}",
            )
        return blocks, first, first + num_pages

    def _start(self, job: Job | None, after: Event | None = None) -> Transfer | None:
        submitted = self._binding.dispatch(after)
        return submitted.get(job.id) if job is not None else None

    def _clean(self, num_pages: int, *, room: int | None = None, until: float | None = None) -> None:
        """Under write_back, offload what the device tier is about to give up for `num_pages` new pages, and wait. With
        `until`, a deadline, it is to be made safe only: what storage holds is left alone."""
        if self._plane.policy.when is not WriteWhen.WRITE_BACK:
            return
        with self._lock:
            free = self._plane.directory.stats().tiers["device"].free_pages if room is None else room
            jobs = offload_victims(self._plane, num_pages - free, unless_stored=until is not None)
            self._binding.dispatch()
        limit = self.config.acquire_timeout_s if until is None else max(0.0, until - time.monotonic())
        self._binding.wait(jobs, limit)

    def _need_owned(self, what: str) -> None:
        if not self.config.device_owned:
            raise PolicyError(
                f"{what} needs a device tier that kvhoist owns",
                got="device_owned=False",
                remedy="On a foreign device use match, load(match, device_blocks) and write(match, device_blocks).",
            )
