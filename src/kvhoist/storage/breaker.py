"""When a store's calls are no longer made: it failed as a whole several times in a row, or a call hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)

HANG_S = 10.0
"""A store that takes longer for one call than recomputing would is of no use: 32 MiB in 10 s."""

FENCED = "store fenced off"

_MAX_FAILURES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Breaker:
    """The fuse of one store. While it is fenced, calls are refused; after a pause, doubled each time, one call is let
    through, and its success ends the fence. A call of more than `hang_s` seconds fences the store while it is still
    running, and until it returns. What happens is logged once. Thread-safe.
    """

    def __init__(self, name: str, *, hang_s: float, clock: Callable[[], float]) -> None:
        self.num_fences = 0
        self._name = name
        self._hang_s = hang_s
        self._clock = clock
        self._changed = threading.Condition()
        self._running: dict[int, float] = {}
        self._hung: set[int] = set()
        self._num_calls = 0
        self._failures = 0
        self._fenced: str | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._try_at = 0.0
        self._trial: int | None = None
        self._closed = False

    def refusal(self) -> str | None:
        """Return why a call would be refused now, for people; None where it would be made."""
        with self._changed:
            return self._refusal()

    def hang(self) -> str | None:
        """Return why a call would be refused now, where a call hangs."""
        with self._changed:
            return self._refusal() if self._hung else None

    def begin(self) -> int | str:
        """Return a number for the call that begins, to be ended by `end`; or why it is refused."""
        with self._changed:
            if (refusal := self._refusal()) is not None:
                return refusal
            self._num_calls += 1
            self._running[self._num_calls] = self._clock()
            if self._fenced is not None:
                self._trial = self._num_calls
            self._changed.notify_all()
            return self._num_calls

    def end(self, call: int, fault: str | None) -> None:
        """A call returned; `fault` says why it failed as a whole."""
        with self._changed:
            seconds = self._clock() - self._running.pop(call)
            self._hung.discard(call)
            self._changed.notify_all()
            if fault is None and seconds > self._hang_s:
                fault = f"a call took {seconds:.1f} s"
            was_trial, self._trial = self._trial == call, None if self._trial == call else self._trial
            if fault is None:
                self._failures = 0
                if was_trial and not self._hung:
                    self._fenced, self._pause_s = None, _FIRST_PAUSE_S
                    _log.warning("store %s answers again", self._name)
                return
            self._failures += 1
            if was_trial:
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            if was_trial or self._failures >= _MAX_FAILURES or seconds > self._hang_s:
                self._fence(fault)

    def wait_for_hang(self) -> str | None:
        """Block until a call runs for too long, fence the store, and return why; None once closed."""
        with self._changed:
            while not self._closed:
                call = min(self._running.keys() - self._hung, default=None)  # the oldest
                if call is None:
                    self._changed.wait()
                elif (left_s := self._running[call] + self._hang_s - self._clock()) > 0:
                    self._changed.wait(left_s)
                else:
                    self._hung.add(call)
                    return self._fence(f"a call has not returned for {self._hang_s:g} s")
            return None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _refusal(self) -> str | None:
        if self._fenced is None:
            return None
        if self._trial is None and not self._hung and self._clock() >= self._try_at:
            return None
        return f"{FENCED}: {self._fenced}"

    def _fence(self, why: str) -> str:
        if self._fenced is None:
            self.num_fences += 1
            _log.warning("store %s is fenced off, and tried again in a while: %s", self._name, why)
        self._fenced = why
        self._try_at = self._clock() + self._pause_s
        return why
