"""Keeps the faults of an outside policy away from the directory's books."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvhoist.control.entry import Entry, Space
from kvhoist.control.eviction.base import EvictionPolicy
from kvhoist.errors import PolicyError


class GuardedPolicy(EvictionPolicy):
    """Calls an outside policy. A hook that raises cannot interrupt a change half-way: its exception is kept, and the
    next `choose` raises it as a PolicyError, as it does what `choose` itself raises or a result that is no sequence."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._fault: Exception | None = None

    def admit(self, space: Space, keys: Sequence[bytes]) -> None:
        self._call(self._policy.admit, space, keys)

    def inserted(self, entries: Sequence[Entry]) -> None:
        self._call(self._policy.inserted, tuple(entries))

    def touched(self, entries: Sequence[Entry]) -> None:
        self._call(self._policy.touched, tuple(entries))

    def removed(self, entries: Sequence[Entry]) -> None:
        self._call(self._policy.removed, tuple(entries))

    def exposed(self, entry: Entry) -> None:
        self._call(self._policy.exposed, entry)

    def problems(self, ready: Collection[Entry]) -> list[str]:
        return self._policy.problems(ready)

    def choose(self, num_pages: int) -> list[Entry]:
        fault, self._fault = self._fault, None
        try:
            if fault is not None:
                raise fault
            return list(self._policy.choose(num_pages))
        except Exception as error:  # a stranger's code may raise anything; it is passed on as the cause
            raise PolicyError(
                f"the eviction policy {type(self._policy).__name__} failed",
                got=repr(error),
                remedy="Mend the policy; the directory is unharmed.",
            ) from error

    def _call(self, hook: Callable[..., None], *arguments: Any) -> None:
        try:
            hook(*arguments)
        except Exception as error:  # see the class
            self._fault = self._fault or error
