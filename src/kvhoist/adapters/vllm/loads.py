"""The loads under way: who waits for each, and which pages they bring."""

from __future__ import annotations

from kvhoist.adapters.vllm.metadata import LoadOrder


class Loads:
    """Remembers open LOAD jobs. Not thread-safe."""

    def __init__(self) -> None:
        self._orders: dict[int, LoadOrder] = {}
        self._fetched: dict[int, range] = {}
        self._bringing: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._orders)

    def open(self, order: LoadOrder, fetched: range) -> None:
        """Remember a job, and which of its pages were fetched from storage for it."""
        self._orders[order.job.id] = order
        self._fetched[order.job.id] = fetched
        if not order.sync:  # a synchronous load is over before another request could look
            self._bringing.update(dict.fromkeys(order.job.keys, order.job.id))

    def order(self, job_id: int) -> LoadOrder:
        return self._orders[job_id]

    def brings(self, key: bytes) -> bool:
        """Tell whether a load is under way after which vLLM finds the page on its device."""
        return key in self._bringing

    def close(self, job_id: int) -> tuple[LoadOrder, range]:
        """Forget a job that is finished, and return its order and which of its pages were fetched."""
        order = self._orders.pop(job_id)
        bringing = self._bringing
        for key in order.job.keys:
            if bringing.get(key) == job_id:
                del bringing[key]
        return order, self._fetched.pop(job_id)
