"""The moves and the upkeep that a cache offers tier by tier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvhoist.binding import Binding
from kvhoist.config import CacheConfig
from kvhoist.control.directory_events import Event as DirectoryEvent
from kvhoist.control.namespace import Namespace
from kvhoist.control.pins import Pins
from kvhoist.control.policy import WriteWhen
from kvhoist.control.tiers import Tier
from kvhoist.errors import ConfigError, PolicyError
from kvhoist.geometry import CacheGroup
from kvhoist.lease import Match
from kvhoist.messages import Job
from kvhoist.platform.base import Event
from kvhoist.settings import Settings
from kvhoist.transfer import Transfer

_log = logging.getLogger(__name__)


class TierMoves:
    """What `HierarchicalCache` does when told which tier: the half of it that knows nothing of tokens."""

    def __init__(self, binding: Binding, config: CacheConfig, group: CacheGroup) -> None:
        self.config = config
        self.group = group
        self._binding = binding
        self._lock = binding.lock
        self._plane = binding.plane
        self._disabled = Settings.from_env().disabled
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
        stop = len(match.keys) if device_blocks is None else self._stop(match, device_blocks, first)
        with self._lock:
            self._binding.check_open()
            return self._start(self._plane.offload(match.space, match.keys, first, stop, device_blocks), after)

    def write(
        self, match: Match, device_blocks: Sequence[int], *, first: int = 0, after: Event | None = None
    ) -> Transfer | None:
        """Offer freshly computed pages of a foreign device to the write policy: as `offload`, where it says so."""
        if self._disabled:
            return None
        stop = self._stop(match, device_blocks, first)
        with self._lock:
            self._binding.check_open()
            return self._start(self._plane.write(match.space, match.keys, first, stop, device_blocks), after)

    def load(
        self, match: Match, device_blocks: Sequence[int], *, first: int = 0, after: Event | None = None
    ) -> Transfer | None:
        """Copy pages from `first` on, ready in the host tier, to the blocks of a foreign device, which belong to the
        transfer until it is done. An owned device uses `acquire`. Raises PageIdError for a page that is not ready, and,
        as `offload` and `write` do, ConfigError for blocks that are not whole pages, repeat, or do not exist."""
        if self._disabled:
            return None
        stop = self._stop(match, device_blocks, first)
        with self._lock:
            self._binding.check_open()
            return self._start(self._plane.load(match.space, match.keys, first, stop, device_blocks), after)

    def prefetch(self, match: Match) -> Transfer | None:
        """Bring those of the match's pages that only storage holds to the host tier, verified; None where none is."""
        with self._lock:
            self._binding.check_open()
            entries = self._plane.directory.match(match.space, match.keys)
            lacking = [i for i, e in enumerate(entries) if not (e.is_ready(Tier.DEVICE) or e.is_ready(Tier.HOST))]
            if not lacking:
                return None
            return self._start(self._plane.prefetch(match.space, match.keys, lacking[0], lacking[-1] + 1))

    def persist(self, match: Match) -> Transfer | None:
        """Write to storage what the host tier has of the match and storage is not known to hold; None for nothing."""
        with self._lock:
            self._binding.check_open()
            entries = self._plane.directory.match(match.space, match.keys)
            return self._start(self._plane.persist(entries) if self._plane.has_storage else None)

    # -- upkeep ----------------------------------------------------------------------------------------------------

    def pin(self, match: Match) -> Pins:
        """Forbid the tiers to evict what they hold now of the matched pages, until `unpin`."""
        pins = Pins(self._plane.directory)
        with self._lock:
            self._binding.check_open()
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
        went: pinned ones stay. Under `write_back` device pages are offloaded first. Raises PolicyError."""
        chosen = {"device": Tier.DEVICE, "host": Tier.HOST}.get(tier)
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
        With `storage` remove them from the store too. Returns the number of pages forgotten."""
        with self._lock:
            self._binding.check_open()
            space = self._plane.space(namespace) if namespace else None
            count = self._plane.clear(space)
        store = self._binding.store
        if storage and store is not None:
            for digest in [namespace.digest] if namespace else list(store.namespaces()):
                store.remove_namespace(digest)
        return count

    def subscribe(self, callback: Callable[[DirectoryEvent], None]) -> Callable[[], None]:
        """Call `callback` for pages stored in or removed from a tier (under the cache's lock: be quick, call nothing
        of the cache); returns the call that ends it."""
        with self._lock:
            return self._plane.directory.subscribe(callback)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _stop(self, match: Match, device_blocks: Sequence[int], first: int) -> int:
        """Return one past the last page whose blocks the caller named, once all of them can be meant."""
        if self.config.device_owned:
            raise PolicyError("kvhoist gives out the blocks of this device itself", remedy="Use acquire and reserve.")
        num_pages, rest = divmod(len(device_blocks), self.group.blocks_per_page)
        fits = not rest and 0 <= first <= first + num_pages <= len(match.keys)
        known = all(0 <= block < self._binding.num_device_blocks for block in device_blocks)
        if not fits or not known or len(set(device_blocks)) < len(device_blocks):
            raise ConfigError(
                "these device blocks cannot hold pages of the match",
                got=f"{len(device_blocks)} blocks from page {first} on: {list(device_blocks[:8])}",
                expected=f"{self.group.blocks_per_page} blocks a page for at most {len(match.keys)} pages, "
                f"each id once and below {self._binding.num_device_blocks}",
            )
        return first + num_pages

    def _start(self, job: Job | None, after: Event | None = None) -> Transfer | None:
        submitted = self._binding.dispatch(after)
        return submitted.get(job.id) if job is not None else None

    def _clean(self, num_pages: int, *, room: int | None = None) -> None:
        """Under write_back, offload what the device tier is about to give up for `num_pages` new pages, and wait."""
        if self._plane.policy.when is not WriteWhen.WRITE_BACK:
            return
        with self._lock:
            free = self._plane.directory.stats().tiers["device"].free_pages if room is None else room
            jobs = self._plane.offload_victims(num_pages - free)
            self._binding.dispatch()
        self._binding.wait(jobs, self.config.acquire_timeout_s)

    def _need_owned(self, what: str) -> None:
        if not self.config.device_owned:
            raise PolicyError(
                f"{what} needs a device tier that kvhoist owns",
                got="device_owned=False",
                remedy="On a foreign device use match, load(match, device_blocks) and write(match, device_blocks).",
            )
