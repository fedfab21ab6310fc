"""What the control plane and the data plane say to each other: jobs down, completions up.

All of it is frozen, small and picklable, and may arrive twice: a duplicate does no harm.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from kvhoist.errors import ConfigError


class JobKind(StrEnum):
    """What a job moves. Source and destination follow from it."""

    OFFLOAD = "offload"  # device blocks -> host pages
    LOAD = "load"  # host pages -> device blocks
    PERSIST = "persist"  # host pages -> storage
    PREFETCH = "prefetch"  # storage -> host pages, verified
    LOOKUP = "lookup"  # ask storage which keys it holds; moves nothing
    DROP = "drop"  # remove keys from storage


LEFT_OUT = -1
"""In the place of a device block that a copy would write: leave that block alone."""


class Shard(NamedTuple):
    """Which part of a page a rank holds: `rank` of `num_ranks`, or `(0, 0)` where all ranks hold the same bytes."""

    rank: int
    num_ranks: int

    def __str__(self) -> str:
        return "replicated" if self == REPLICATED else f"{self.rank}/{self.num_ranks}"


REPLICATED = Shard(0, 0)
WHOLE = Shard(0, 1)


class PageKey(NamedTuple):
    """The identity of a page: who may use it (namespace digest, 32 bytes), its cache group, its chain hash."""

    namespace: bytes
    group: int
    chain_hash: bytes


class StorageKey(NamedTuple):
    """The identity of one shard of a page in storage."""

    page: PageKey
    shard: Shard

    def __str__(self) -> str:
        page = self.page
        return f"{page.namespace.hex()[:16]}/{page.group}/{page.chain_hash.hex()}/{self.shard}"


@dataclass(frozen=True, slots=True)
class Job:
    """An order to every rank. Page `i` has key `keys[i]`, host page `host_pages[i]` and, where the device is an end,
    the device blocks `device_blocks[i * blocks_per_page : (i + 1) * blocks_per_page]`.

    `host_pages` is empty for LOOKUP and DROP, `device_blocks` for all kinds but OFFLOAD and LOAD. In a LOAD a block of
    LEFT_OUT (-1) is not written, the rest of its page is; in an OFFLOAD every block is read. `keys` are chain hashes;
    with `namespace` and `group` they make page keys. Raises ConfigError when the counts do not fit.
    """

    id: int
    kind: JobKind
    namespace: bytes
    group: int
    keys: tuple[bytes, ...]
    host_pages: tuple[int, ...] = ()
    device_blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        num_pages = len(self.keys)
        wants_host = self.kind not in (JobKind.LOOKUP, JobKind.DROP)
        wants_device = self.kind in (JobKind.OFFLOAD, JobKind.LOAD)
        host_fits = len(self.host_pages) == (num_pages if wants_host else 0)
        whole_pages = (
            num_pages > 0 and len(self.device_blocks) >= num_pages and len(self.device_blocks) % num_pages == 0
        )
        if num_pages == 0 or not host_fits or (not whole_pages if wants_device else bool(self.device_blocks)):
            raise ConfigError(
                f"a {self.kind} job whose parts do not fit together",
                got=f"{num_pages} keys, {len(self.host_pages)} host pages, {len(self.device_blocks)} device blocks",
                expected=f"at least one key, {'one host page a key' if wants_host else 'no host pages'}, "
                f"{'blocks_per_page device blocks a key' if wants_device else 'no device blocks'}",
            )

    @property
    def num_pages(self) -> int:
        return len(self.keys)

    def without(self, pages: Collection[int]) -> Job | None:
        """Return the order for all pages but those of the indices `pages`; None where none is left."""
        indices = [i for i in range(self.num_pages) if i not in pages]
        if not indices:
            return None
        per_page = len(self.device_blocks) // self.num_pages
        return replace(
            self,
            keys=tuple(self.keys[i] for i in indices),
            host_pages=tuple(self.host_pages[i] for i in indices if self.host_pages),
            device_blocks=tuple(b for i in indices for b in self.device_blocks[i * per_page : (i + 1) * per_page]),
        )

    def page_key(self, index: int) -> PageKey:
        return PageKey(self.namespace, self.group, self.keys[index])


@dataclass(frozen=True, slots=True)
class Completion:
    """One rank's answer to a job. `failed_pages` are indices into the job's keys (for LOOKUP: the keys not found);
    `error` says why, for people. `bytes` moved and `seconds` from start to end, for metrics.

    A job of which a part hangs in storage may be answered in parts: `pending_pages` are those of which this answer says
    nothing; they go on belonging to the job, and the rank answers again.
    """

    id: int
    rank: int
    failed_pages: tuple[int, ...] = ()
    error: str | None = None
    bytes: int = 0
    seconds: float = 0.0
    pending_pages: tuple[int, ...] = ()

    @classmethod
    def failed(cls, job: Job, rank: int, error: str) -> Completion:
        """Return the answer that no page of `job` could be moved."""
        return cls(job.id, rank, tuple(range(job.num_pages)), error)
