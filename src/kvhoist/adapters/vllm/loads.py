"""The loads under way: who waits for each, and which pages they bring."""

from __future__ import annotations

from collections.abc import Sequence

from kvhoist.adapters.vllm.metadata import LoadOrder
from kvhoist.control.tiers import Tier


class Loads:
    """Remembers open LOAD jobs. Not thread-safe."""

    def __init__(self) -> None:
        self._orders: dict[int, LoadOrder] = {}
        self._tiers: dict[int, Sequence[Tier]] = {}
        self._bringing: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._orders)

    def open(self, order: LoadOrder, tiers: Sequence[Tier]) -> None:
        """Remember a job, and in which tier each of its pages was found."""
        self._orders[order.job.id] = order
        self._tiers[order.job.id] = tiers
        if not order.sync:  # a synchronous load is over before another request could look
            self._bringing.update(dict.fromkeys(order.job.keys, order.job.id))

    def order(self, job_id: int) -> LoadOrder:
        return self._orders[job_id]

    def brings(self, key: bytes) -> bool:
        """Tell whether a load is under way after which vLLM finds the page on its device."""
        return key in self._bringing

    def close(self, job_id: int) -> tuple[LoadOrder, Sequence[Tier]]:
        """Forget a job that is finished, and return its order and the tiers of its pages."""
        order = self._orders.pop(job_id)
        for key in order.job.keys:
            if self._bringing.get(key) == job_id:
                del self._bringing[key]
        return order, self._tiers.pop(job_id)
