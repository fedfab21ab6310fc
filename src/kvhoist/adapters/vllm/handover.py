"""Prefill on one engine, decode on another: what the first says at a request's end, and the second waits for.

The words are those of vLLM's own connectors, so that routers made for these need not know of kvhoist. A request with
`do_remote_decode` in its `kv_transfer_params` is answered with `kv_transfer_params` that the router hands on, with the
request, to the engine that decodes; they hold `do_remote_prefill`. The answer leaves before the last pages are in
storage: the second engine asks for those again until they are there, or until none has come for a while.
"""

from __future__ import annotations

from typing import Any

_TOKENS = "kvhoist_tokens"


def is_to_hand_over(request: Any) -> bool:
    """Tell whether another engine is to go on with the request."""
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


def announcement(num_tokens: int) -> dict[str, Any]:
    """Return what is said of a request of which `num_tokens` tokens are in storage, or on their way there."""
    return {"do_remote_decode": False, "do_remote_prefill": True, _TOKENS: num_tokens}


def announced_tokens(request: Any) -> int:
    """Return how many tokens of the request another engine has announced: all, where it was not kvhoist that did."""
    params = request.kv_transfer_params or {}
    if not params.get("do_remote_prefill"):
        return 0
    number = params.get(_TOKENS)
    return number if isinstance(number, int) else int(request.num_tokens)
