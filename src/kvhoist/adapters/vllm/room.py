"""Room on the device for requests that load, in vLLM releases that keep none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.request import RequestStatus


class Room:
    """Decides whether a request may load, or be scheduled, now. For releases before 0.32, whose scheduler lets requests
    load into the last free blocks: each then waits for the blocks of the others, behind a request that does not fit,
    and the engine for ever.

    Requests may load as long as the device could hold all that are loading, or have loaded and not run yet, at their
    full length; others ask again. While nothing runs, what has loaded goes first. Not thread-safe.
    """

    def __init__(self, num_blocks: int, block_tokens: int, num_speculative_tokens: int) -> None:
        self._num_blocks = num_blocks
        self._block_tokens = block_tokens
        self._more_tokens = 2 * (1 + num_speculative_tokens)  # sampled and drafted in the steps under way
        self._requests: dict[str, Any] = {}
        self._arrived: set[str] = set()
        self._first: str | None = None

    def admits(self, request: Any, *, loads: bool) -> bool:
        """Tell whether `request`, asked for by vLLM, may go on: to load, or to be scheduled as it is."""
        self._requests[request.request_id] = request
        holding = [one for one in self._requests.values() if one is not request and _holds_blocks(one)]
        if loads:
            return self._admits_load(request, holding)
        if self._first == request.request_id:
            self._first = None
        running = any(one.status is RequestStatus.RUNNING for one in self._requests.values())
        return running or not any(one.request_id in self._arrived for one in holding)

    def arrived(self, request_ids: Iterable[str]) -> None:
        """The loads of these requests are over."""
        self._arrived.update(request_id for request_id in request_ids if request_id in self._requests)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._requests.pop(request_id, None)
        self._arrived.discard(request_id)

    def _admits_load(self, request: Any, holding: list[Any]) -> bool:
        if self._first != request.request_id and self._first in self._requests and holding:
            return False  # smaller ones would overtake it for ever
        fits = not holding or sum(map(self._blocks_of, holding)) + self._blocks_of(request) <= self._num_blocks
        self._first = None if fits else request.request_id
        return fits

    def _blocks_of(self, request: Any) -> int:
        return -(-(int(request.num_tokens) + self._more_tokens) // self._block_tokens)


def _holds_blocks(request: Any) -> bool:
    """Tell whether a request that does not run keeps blocks: it is loading, or has loaded."""
    if request.status is RequestStatus.RUNNING:
        return False
    return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS or request.num_computed_tokens > 0
