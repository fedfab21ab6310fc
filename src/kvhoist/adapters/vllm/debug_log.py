"""What the log says of a request at debug level: how much of its prompt the tiers hold, and why not more."""

from __future__ import annotations

import logging

from kvhoist.adapters.vllm.requests import PageShape, RequestState
from kvhoist.control.directory import Space
from kvhoist.control.plane import ControlPlane

_log = logging.getLogger("kvhoist.adapters.vllm.scheduler")


def tell(plane: ControlPlane, space: Space, shape: PageShape, state: RequestState, num_computed_tokens: int) -> None:
    """Say it, once a request."""
    if state.told or not _log.isEnabledFor(logging.DEBUG):
        return
    state.told = True
    request, found = state.request, len(state.found_blocks) * shape.block_tokens
    asked = " Storage was asked for what is missing." if state.asked_storage else ""
    _log.debug(
        "kvhoist: request %s: %d of %d tokens are on the device, %d more can be loaded.%s %s",
        request.request_id,
        num_computed_tokens,
        request.num_tokens,
        found,
        asked,
        plane.explain(space, state.keys, request.num_tokens),
    )
