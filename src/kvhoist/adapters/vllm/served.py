"""What a vLLM engine shows and does for `kvhoist ps`, `attach` and `detach`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhoist.adapters.vllm.scheduler import SchedulerSide
from kvhoist.control.tiers import Tier
from kvhoist.served_cache import status_of


class ServedEngine:
    """An engine by its scheduler's side. Called from threads of the runtime server."""

    def __init__(self, side: SchedulerSide) -> None:
        self._side = side
        self._num_host_pages = side.plane.directory.stats().tiers[str(Tier.HOST)].capacity_pages

    def status(self) -> Mapping[str, Any]:
        return status_of("vllm", self._side.namespace, self._num_host_pages, self._side.stores.state)

    def attach(self, address: str) -> Mapping[str, Any]:
        return self._side.stores.attach(address)

    def detach(self, *, drain: bool, timeout_s: float) -> Mapping[str, Any]:
        return self._side.stores.detach(drain=drain, timeout_s=timeout_s)
