"""What travels between the scheduler's side and the workers' side, beside jobs and completions themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvhoist.messages import Completion, Job


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A LOAD job and the request that waits for it. `sync`: the request is part of this step's batch."""

    job: Job
    request_id: str
    sync: bool


class StoreAct(StrEnum):
    """What ranks are to do with a store: open one, use the one that is open, give it up."""

    OPEN = "open"
    USE = "use"
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """An order to every rank. `address` is of the store to OPEN; `drain` and `timeout_s` say how to GIVE_UP."""

    id: int
    act: StoreAct
    address: str = ""
    drain: bool = False
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """One rank's answer to OPEN (`error`: why it could not; `persists`: the store can be written) or to GIVE_UP
    (`memory_kept`: a call of the store has not returned)."""

    rank: int
    order_id: int
    error: str | None = None
    persists: bool = True
    memory_kept: bool = False


@dataclass(frozen=True, slots=True)
class ConnectorMetadata(KVConnectorMetadata):
    """The orders of one step, the same for every rank.

    `jobs` are submitted before the forward: offloads (which read what earlier steps computed) and storage jobs. `loads`
    are submitted when vLLM starts loads. `fences` are the ids of offloads, of this step or before, that must have read
    their blocks before this step writes: it has given those blocks to other requests. `cancels` are the ids of
    prefetches, of this step or before, that nobody waits for any more. `namespace` are the fields of the namespace in
    use, sent once. `store` is obeyed after the jobs are submitted. `is_off` says that the scheduler runs without the
    cache: ranks give theirs back.
    """

    jobs: tuple[Job, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    fences: tuple[int, ...] = ()
    cancels: tuple[int, ...] = ()
    namespace: Mapping[str, str] | None = None
    store: StoreOrder | None = None
    is_off: bool = False


NO_ORDERS = ConnectorMetadata()
"""The orders of a step that has none."""

NO_CACHE = ConnectorMetadata(is_off=True)
"""The orders of a scheduler without the cache."""


@dataclass(frozen=True, slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """What ranks have done since their last report; `counts` are further events since then, by name."""

    completions: tuple[Completion, ...]
    counts: Mapping[str, float] = field(default_factory=dict)
    stores: tuple[StoreAnswer, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerMetadata), "all ranks run the same connector"
        counts = dict(self.counts)
        for name, value in other.counts.items():
            counts[name] = counts.get(name, 0) + value
        return WorkerMetadata(self.completions + other.completions, counts, self.stores + other.stores)


@dataclass(frozen=True, slots=True)
class WorkerReport(KVConnectorHandshakeMetadata):
    """What a rank found at its start. `error` says why it cannot take part; all else is empty then.

    `components` are those of its cache group, `block_order` names what lies inside its blocks, `options` are its
    settings: all but the components of pipeline stages must be the same on every rank.
    """

    rank: int
    num_ranks: int
    error: str | None = None
    num_host_pages: int = 0
    page_tokens: int = 0
    blocks_per_page: int = 0
    components: tuple[tuple[str, tuple[int, ...], int, int], ...] = ()
    block_order: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
