"""What storage was asked, so that it is not asked the same again while the answer is on its way or fresh."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvhoist.control.entry import Space
from kvhoist.control.flights import Flights
from kvhoist.messages import Job

_MOST_REMEMBERED = 4096
_MOST_OPEN = 1024
"""Questions under way: with more of them storage hangs, and a further one would only wait behind them."""


class Lookups:
    """Opens LOOKUP jobs. A question is asked again after `ttl_s` at the earliest, unless its asker knows better, and
    never before it was answered."""

    def __init__(self, flights: Flights, clock: Callable[[], float], ttl_s: float) -> None:
        self._flights = flights
        self._clock = clock
        self._ttl_s = ttl_s
        self._asked: dict[tuple[bytes, bytes], tuple[float, int]] = {}

    def ask(self, space: Space, keys: Sequence[bytes], first: int, *, again: bool = False) -> Job | None:
        """Ask for keys[first:]; None where that is not called for. `again`: though the answer is fresh."""
        if first >= len(keys):
            return None
        now = self._clock()
        question = (space.namespace.digest, keys[first] + keys[-1])
        asked, job_id = self._asked.get(question, (-1e9, -1))
        is_fresh = now - asked < self._ttl_s and not again
        if is_fresh or self._flights.is_open(job_id) or self._flights.num_asked >= _MOST_OPEN:
            return None
        if len(self._asked) >= _MOST_REMEMBERED:
            self._asked.clear()
        job = self._flights.ask(space, keys, first)
        self._asked[question] = (now, job.id)
        return job

    def under_way(self, space: Space, keys: Sequence[bytes], first: int) -> int | None:
        """Return the id of the job that asks for keys[first:]; None where it was answered, or never asked."""
        if first >= len(keys):
            return None
        job_id = self._asked.get((space.namespace.digest, keys[first] + keys[-1]), (0.0, -1))[1]
        return job_id if self._flights.is_open(job_id) else None

    def forget(self) -> None:
        self._asked.clear()
