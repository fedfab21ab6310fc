"""HierarchicalCache: both planes in one process, for an engine that runs in it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from kvhoist import acquire
from kvhoist.binding import Binding
from kvhoist.checks import count, seconds
from kvhoist.config import CacheConfig
from kvhoist.control.directory import Space
from kvhoist.control.explain import Explanation
from kvhoist.control.keys import TokenChain, Tokens, chain_hashes
from kvhoist.control.namespace import Namespace
from kvhoist.control.pins import Pins
from kvhoist.control.policy import WriteWhen
from kvhoist.control.tiers import Tier
from kvhoist.device_layout import DeviceCache
from kvhoist.errors import ConfigError, GeometryError, UnsupportedGeometryError
from kvhoist.geometry import CacheGeometry, CacheGroup
from kvhoist.lease import Lease, Match, Reservation
from kvhoist.moves import TierMoves
from kvhoist.runtime import RuntimeServer
from kvhoist.served_cache import ServedCache
from kvhoist.settings import Settings
from kvhoist.stats import CacheStats, CloseReport
from kvhoist.storage.base import Store


class HierarchicalCache(TierMoves):
    """A device cache backed by pinned host memory and storage. Thread-safe; use it as a context manager.

    geometry: what a page is (one cache group). namespace: what determines its bytes besides the tokens; methods take
    another one where one device cache serves several (adapters, tenants). device: the engine's tensors as
    `read_device_layout` reads them, kept alive by the cache. host_bytes: size of the host tier (`"64GiB"`), taken at
    once and exactly. store: a Store, or an address for `open_store` such as `"file:/var/cache/kv?capacity=1TiB"`; a
    store given as an object stays open at close. engine_stream: on a GPU, returns the handle of the stream in which
    the calling thread's model works (`lambda: torch.cuda.current_stream().cuda_stream`): copies of pages that it wrote
    or gave back start after what it has been given to do by then.

    Raises GeometryError where device and geometry differ, UnsupportedGeometryError for several cache groups,
    PolicyError for an unknown policy or `write_back` on a device tier that the engine owns, HostMemoryError,
    StorageError.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        namespace: Namespace,
        *,
        device: DeviceCache,
        host_bytes: int | str,
        store: Store | str | None = None,
        config: CacheConfig | None = None,
        engine_stream: Callable[[], int] | None = None,
    ) -> None:
        config = config or CacheConfig()
        self.namespace = _namespace(namespace)
        disabled = Settings.from_env().disabled
        group = _only_group(geometry)
        if device.layout.group != group:
            raise GeometryError(
                "the device tensors are not of this geometry",
                got=device.layout.group.describe(),
                expected=group.describe(),
            )
        binding = Binding(group, device, host_bytes, store, config, engine_stream)
        super().__init__(binding, config, group, disabled=disabled)
        self.space(namespace)
        self._server = None if disabled else RuntimeServer.open(ServedCache(binding, namespace))

    # -- what is there ---------------------------------------------------------------------------------------------

    @property
    def num_host_pages(self) -> int:
        return self._binding.arena.num_pages

    def space(self, namespace: Namespace | None = None) -> Space:
        """Return the directory's handle of a namespace (default: the cache's own), noting it in the store."""
        chosen = self.namespace if namespace is None else _namespace(namespace)
        with self._lock:
            self._binding.check_open()
            self._binding.slot.note(chosen)
            return self._plane.space(chosen)

    def match(
        self,
        tokens: Tokens,
        *,
        salt: bytes = b"",
        extras: Mapping[int, bytes] | None = None,
        chain: TokenChain | None = None,
        max_tokens: int | None = None,
        namespace: Namespace | None = None,
        timeout_s: float | None = None,
    ) -> Match:
        """Return the longest prefix of `tokens` that the tiers hold, in whole pages, within `max_tokens` (give
        `len(tokens) - 1` to leave the last token to be computed).

        `salt` separates tenants, `extras` maps a page index to what else determines it (multimodal hashes). A
        conversation passes its `chain`, so that only new pages are hashed. Waits up to `timeout_s` (default
        `lookup_timeout_s`) for storage to say what it holds; 0 never waits. Raises TokenError, ConfigError for other
        arguments that cannot be (a `chain` of another salt or page), ClosedError.
        """
        limit = self.config.lookup_timeout_s if timeout_s is None else seconds("timeout_s", timeout_s)
        keys = self._keys(tokens, salt, extras, chain)
        if max_tokens is not None:
            keys = keys[: max(0, count("max_tokens", max_tokens, least=-1)) // self.group.page_tokens]
        space = self.space(namespace)
        with self._lock:
            self._binding.check_open()
            nearest = self._nearest(space, keys)
            transfer = self._asking(space, keys, len(nearest))
        pending = transfer is not None
        if transfer is not None:
            with contextlib.suppress(TimeoutError):
                transfer.result(limit)
                pending = False
            with self._lock:
                nearest = self._nearest(space, keys)
        by_tier = {str(tier): nearest.count(tier) for tier in Tier}
        return Match(space, tuple(keys), self.group.page_tokens, len(nearest), by_tier, pending)

    def explain(
        self,
        tokens: Tokens,
        *,
        salt: bytes = b"",
        extras: Mapping[int, bytes] | None = None,
        chain: TokenChain | None = None,
        namespace: Namespace | None = None,
    ) -> Explanation:
        """Say page by page which tiers hold `tokens`, and for the first miss why.

        Asks storage as `match` does, also for the same tokens in the other namespaces that the store knows.
        """
        if self._disabled:
            space, keys = self.space(namespace), chain_hashes(tokens, self.group.page_tokens, extras=extras, salt=salt)
            with self._lock:
                self._plane.directory.note_skipped(space, keys, "KVHOIST_DISABLE is set")
                return self._plane.explain(space, keys, len(tokens))
        match = self.match(tokens, salt=salt, extras=extras, chain=chain, namespace=namespace)
        if match.num_pages < len(match.keys):
            self._ask_other_namespaces(match)
        with self._lock:
            return self._plane.explain(match.space, match.keys, len(tokens))

    # -- an owned device tier --------------------------------------------------------------------------------------

    def acquire(
        self, match: Match, *, timeout_s: float | None = None, layerwise: bool = False, for_whom: str = ""
    ) -> Lease:
        """Bring the matched prefix to the device and pin it there; the lease may be shorter than the match (a page
        failed, is late after `timeout_s`, or does not fit). With `layerwise` it returns while loads are under way.

        `for_whom` names the request in the history of what had to be evicted. Raises PolicyError on a foreign device.
        """
        self._need_owned("acquire")
        limit = self.config.acquire_timeout_s if timeout_s is None else seconds("timeout_s", timeout_s)
        with self._lock:
            self._check(match)
            way = acquire.Acquisition(self._plane, match, self._binding, for_whom)
        try:
            self._clean(match.num_pages - match.pages_by_tier["device"])
            loads = acquire.run(way, self._lock, self._binding, timeout_s=limit, layerwise=layerwise)
            with self._lock:
                self._binding.points.catch_up()
                pages = way.pages(loading=bool(loads))
                tiers = way.finish(len(pages))
                if self._plane.policy.when is WriteWhen.WRITE_THROUGH_SELECTIVE and pages:
                    self._plane.write(match.space, match.keys, 0, len(pages), for_whom=for_whom)
                self._plane.write_left_out(match.space, match.keys, len(pages), for_whom=for_whom)
                self._binding.dispatch()
                way.pins.release([Tier.HOST])
        except BaseException:
            self._release(way.pins)
            raise
        return Lease(match, pages, tiers, loads, lambda: self._release(way.pins), self._binding.points.stream)

    def reserve(
        self,
        tokens: Tokens,
        *,
        lease: Lease | None = None,
        salt: bytes = b"",
        extras: Mapping[int, bytes] | None = None,
        chain: TokenChain | None = None,
        namespace: Namespace | None = None,
        for_whom: str = "",
    ) -> Reservation:
        """Reserve device pages for those whole pages of `tokens` after `lease` that the device does not hold yet.

        Raises PolicyError on a foreign device, TokenError, ConfigError for a lease of other tokens or of another
        namespace, ClosedError.
        """
        self._need_owned("reserve")
        keys = self._keys(tokens, salt, extras, chain)
        if lease is not None:
            self._check_prefix(lease, keys, namespace)
        space = lease.match.space if lease else self.space(namespace)
        start = min(lease.num_pages if lease else 0, len(keys))
        self._clean(len(keys) - start)
        with self._lock:
            self._binding.check_open()
            entries = self._plane.directory.reserve(space, keys, start, len(keys), Tier.DEVICE, for_whom=for_whom)
        index = {key: i for i, key in enumerate(keys)}
        indices = [index[entry.key] for entry in entries]
        pages = [page for entry in entries if (page := entry.page(Tier.DEVICE)) is not None]

        def commit() -> None:
            with self._lock:
                self._binding.points.mark()
                self._plane.commit(space, keys, indices, entries, for_whom=for_whom)
                self._binding.dispatch()

        def abandon() -> None:
            with self._lock:
                self._binding.points.mark()
                self._plane.directory.fail(entries, Tier.DEVICE, "its request gave up before the page was complete")

        return Reservation(indices, pages, commit, abandon)

    # -- upkeep ----------------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        return self._binding.stats()

    def audit(self) -> None:
        """Recount every page id, pin and job. Raises PageIdError naming what does not add up."""
        with self._lock:
            self._plane.audit()

    def close(self, *, drain: bool = True, timeout_s: float = 60.0) -> CloseReport:
        """Finish what is under way (or cancel it, without `drain`), account for every page, release everything.
        Idempotent; returns the first call's report. Raises PageIdError when the books do not add up."""
        limit = seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + limit
        if self._server is not None:
            self._server.close()
        if drain and not self._binding.closing and not self._binding.forked:
            self.flush(limit)
        return self._binding.close(drain=drain, timeout_s=max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> HierarchicalCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _ask_other_namespaces(self, match: Match) -> None:
        others = self._binding.slot.noted()
        with self._lock:
            spaces = [self._plane.space(other) for other in others if other != match.space.namespace]
            jobs = [self._plane.lookup(space, match.keys, 0) for space in spaces]
            self._binding.dispatch()
        self._binding.wait(jobs, self.config.lookup_timeout_s)

    def _keys(
        self, tokens: Tokens, salt: bytes, extras: Mapping[int, bytes] | None, chain: TokenChain | None
    ) -> list[bytes]:
        if self._disabled:
            return []
        if chain is not None:
            if chain.page_tokens != self.group.page_tokens or (salt and not chain.salted_with(salt)):
                raise ConfigError(
                    "this chain is not one of these pages",
                    got=f"a chain of {chain.page_tokens} tokens a page",
                    expected=f"{self.group.page_tokens} tokens a page, and the salt of this call",
                    remedy="Build it as TokenChain(page_tokens, salt), one for each conversation.",
                )
            return chain.keys(tokens, extras)
        return chain_hashes(tokens, self.group.page_tokens, extras=extras, salt=salt)

    def _release(self, pins: Pins) -> None:
        with self._lock:
            self._binding.points.mark()
            pins.release()


def _namespace(given: object) -> Namespace:
    if not isinstance(given, Namespace):
        raise ConfigError("this is no namespace", got=type(given).__name__, expected="Namespace.create(...)")
    return given


def _only_group(geometry: CacheGeometry) -> CacheGroup:
    if len(geometry.groups) != 1:
        raise UnsupportedGeometryError(
            "a cache serves one cache group today",
            got=f"{len(geometry.groups)} groups",
            remedy="Build one HierarchicalCache for each group.",
        )
    return geometry.groups[0]
