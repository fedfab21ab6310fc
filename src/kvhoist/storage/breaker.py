"""When a store's calls are no longer made: those of a kind failed as a whole several times in a row, or one hangs."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

_log = logging.getLogger(__name__)

HANG_S = 10.0
"""A store that takes longer for one call than recomputing would is of no use: 32 MiB in 10 s."""

FENCED = "store fenced off"

_MAX_FAILURES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 15.0


@dataclass(slots=True)
class _Fuse:
    """That of one kind of call. `why` is None where it is whole."""

    failures: int = 0
    why: str | None = None
    pause_s: float = _FIRST_PAUSE_S
    try_at: float = 0.0
    trial: int | None = None


class Breaker:
    """The fuses of one store, one for each kind of call: it may answer look-ups and fail all reads. Calls of a kind
    that is fenced are refused; after a pause, doubled each time, one is let through, and its success ends the fence and
    the pauses of the other kinds.
    While a call hangs, for more than `hang_s` seconds, all calls are refused. What happens is logged once. Thread-safe.
    """

    def __init__(self, name: str, *, hang_s: float, clock: Callable[[], float]) -> None:
        self.num_fences = 0
        self._name = name
        self._hang_s = hang_s
        self._hangs = f"a call has not returned for {hang_s:g} s"
        self._clock = clock
        self._changed = threading.Condition()
        self._running: dict[int, tuple[str, float]] = {}
        self._hung: set[int] = set()
        self._num_calls = 0
        self._fuses: defaultdict[str, _Fuse] = defaultdict(_Fuse)
        self._closed = False

    @property
    def fenced(self) -> bool:
        """Whether calls of any kind are refused, or were until now."""
        with self._changed:
            return bool(self._hung) or any(fuse.why is not None for fuse in self._fuses.values())

    def refusal(self, kind: str) -> str | None:
        """Return why a call would be refused now, for people; None where it would be made."""
        with self._changed:
            return self._refusal(kind)

    def hang(self) -> str | None:
        """Return why all calls are refused, where one hangs."""
        with self._changed:
            return self._hang()

    def begin(self, kind: str) -> int | str:
        """Return a number for the call that begins, to be ended by `end`; or why it is refused."""
        with self._changed:
            if (refusal := self._refusal(kind)) is not None:
                return refusal
            self._num_calls += 1
            self._running[self._num_calls] = kind, self._clock()
            if self._fuses[kind].why is not None:
                self._fuses[kind].trial = self._num_calls
            self._changed.notify_all()
            return self._num_calls

    def end(self, call: int, fault: str | None) -> None:
        """A call returned; `fault` says why it failed as a whole."""
        with self._changed:
            kind, began = self._running.pop(call)
            seconds = self._clock() - began
            self._hung.discard(call)
            self._changed.notify_all()
            if fault is None and seconds > self._hang_s:
                fault = f"a call took {seconds:.1f} s"
            fuse = self._fuses[kind]
            was_trial = fuse.trial == call
            if was_trial:
                fuse.trial = None
            if fault is None:
                fuse.failures = 0
                if was_trial:
                    self._fuses[kind] = _Fuse()
                    for other in self._fuses.values():
                        other.try_at = self._clock()
                    _log.warning("store %s answers again (%s)", self._name, kind)
                return
            fuse.failures += 1
            if was_trial:
                fuse.pause_s = min(2 * fuse.pause_s, _LONGEST_PAUSE_S)
            if was_trial or fuse.failures >= _MAX_FAILURES or seconds > self._hang_s:
                self._blow(kind, fuse, fault)

    def wait_for_hang(self) -> str | None:
        """Block until a call runs for too long, and return why all are refused then; None once closed."""
        with self._changed:
            while not self._closed:
                call = min(self._running.keys() - self._hung, default=None)  # the oldest
                if call is None:
                    self._changed.wait()
                    continue
                kind, began = self._running[call]
                if (left_s := began + self._hang_s - self._clock()) > 0:
                    self._changed.wait(left_s)
                    continue
                self._hung.add(call)
                self._blow(kind, self._fuses[kind], self._hangs)
                return self._hang()
            return None

    def close(self) -> None:
        """Watch no more. Calls that run now count as hanging: nobody waits for them any longer."""
        with self._changed:
            self._closed = True
            self._hung.update(self._running)
            self._changed.notify_all()

    def _hang(self) -> str | None:
        return f"{FENCED}: {self._hangs}" if self._hung else None

    def _refusal(self, kind: str) -> str | None:
        fuse = self._fuses[kind]
        if self._hung or fuse.why is None:
            return self._hang()
        return None if fuse.trial is None and self._clock() >= fuse.try_at else f"{FENCED}: {fuse.why}"

    def _blow(self, kind: str, fuse: _Fuse, why: str) -> None:
        if fuse.why is None:
            self.num_fences += 1
            _log.warning("store %s is fenced off (%s), and tried again in a while: %s", self._name, kind, why)
        fuse.why = why
        fuse.try_at = self._clock() + fuse.pause_s
