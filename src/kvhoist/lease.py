"""What the facade hands to an engine: matches, leases of device pages, reservations of new ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from kvhoist.control.directory import Space
from kvhoist.control.tiers import Tier
from kvhoist.errors import ClosedError
from kvhoist.platform.base import Stream
from kvhoist.transfer import Transfer


@dataclass(frozen=True, slots=True)
class Match:
    """What the tiers hold of a prompt when it was asked for. Nothing is pinned by it.

    `keys` names every whole page of the prompt (up to `max_tokens`), `num_pages` how many leading ones some tier holds,
    `pages_by_tier` in which tier, the nearest counted. `pending` says that storage was asked and had not answered:
    a later match may find more.
    """

    space: Space = field(repr=False)
    keys: tuple[bytes, ...] = field(repr=False)
    page_tokens: int
    num_pages: int
    pages_by_tier: Mapping[str, int]
    pending: bool

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_tokens


class Lease:
    """Device pages that hold a prefix, pinned until `release` (or the end of the `with` block).

    Page `i` of the prefix lies at device page `device_pages[i]`; pages may move elsewhere once the lease is released.
    `tiers[i]` says where it was found: `device`, `host` or `storage`. With a layer-wise lease some pages may still be
    on the way: call `wait(layer)` before reading that layer.
    """

    def __init__(
        self,
        match: Match,
        device_pages: Sequence[int],
        tiers: Sequence[str],
        transfers: Sequence[Transfer],
        release: Callable[[], None],
        engine_stream: Callable[[], Stream | None],
    ) -> None:
        self.match = match
        self.device_pages = list(device_pages)
        self.tiers = list(tiers)
        self.transfers = list(transfers)
        self._release: Callable[[], None] | None = release
        self._engine_stream = engine_stream

    @property
    def num_pages(self) -> int:
        return len(self.device_pages)

    @property
    def num_tokens(self) -> int:
        return len(self.device_pages) * self.match.page_tokens

    @property
    def tokens_by_tier(self) -> dict[str, int]:
        """Tokens of the prefix by the tier in which they were found; every tier is named."""
        pages = Counter(self.tiers)
        return {str(tier): pages[str(tier)] * self.match.page_tokens for tier in Tier}

    def wait(self, layer: int | None = None, *, timeout_s: float | None = None) -> None:
        """Block until `layer` (or all, with None) of every page is on the device; on a GPU let the engine's stream wait
        for that instead, and call `check` when the model has run.

        Raises TransferError when a page failed: recompute then; TimeoutError after `timeout_s`.
        """
        stream = self._engine_stream()
        for transfer in self.transfers:
            transfer.wait(layer, timeout_s=timeout_s, stream=stream)

    def check(self, *, timeout_s: float | None = None) -> None:
        """Block until all pages are on the device. Raises TransferError when one failed: what was computed from it is
        worthless then; TimeoutError."""
        for transfer in self.transfers:
            transfer.wait(timeout_s=timeout_s)

    def keep_arrived(self) -> None:
        """Shorten the lease to the leading pages that are on the device now, and wait for no other any more: what to do
        after `wait` or `check` raised, before the rest is recomputed. The pages stay pinned until `release`."""
        lost = {key for transfer in self.transfers for key in transfer.lost_keys()}
        keys = self.match.keys[: self.num_pages]
        num_pages = next((i for i, key in enumerate(keys) if key in lost), len(keys))
        del self.device_pages[num_pages:], self.tiers[num_pages:]
        self.transfers = []

    def release(self) -> None:
        """Give the pages back to the device tier, where they stay until evicted. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Reservation:
    """Device pages for tokens that are about to be computed: invisible to all until `commit`.

    Write page `page_indices[j]` of the prompt to device page `device_pages[j]`, then commit. Pages that another request
    holds or is computing are left out, and so are pages for which the device tier had no room. Leaving a `with` block
    without a commit abandons.
    """

    def __init__(
        self,
        page_indices: Sequence[int],
        device_pages: Sequence[int],
        commit: Callable[[], None],
        abandon: Callable[[], None],
    ) -> None:
        self.page_indices = list(page_indices)
        self.device_pages = list(device_pages)
        self._commit = commit
        self._abandon = abandon
        self._settled = False

    def commit(self) -> None:
        """Make the pages ready: every byte of them is written. The write policy may offload them from now on.

        Raises ClosedError when the reservation was committed or abandoned before.
        """
        if self._settled:
            raise ClosedError("this reservation is settled already", remedy="Reserve again.")
        self._settled = True
        self._commit()

    def abandon(self) -> None:
        """Give the pages back unread. Idempotent; does nothing after a commit."""
        if not self._settled:
            self._settled = True
            self._abandon()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()
