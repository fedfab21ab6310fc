"""Signals that end a command which has started other processes: they are stopped on the way out, all of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_held() -> Iterator[None]:
    """Keep signals back while a process is made: one between its start and the note of its id would leave it behind."""
    if threading.current_thread() is not threading.main_thread():  # which alone handles signals
        yield
        return
    held: list[int] = []
    before = {number: signal.signal(number, lambda found, _: held.append(found)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for found in held:
            signal.raise_signal(found)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP of this process into SystemExit meanwhile, as SIGINT is KeyboardInterrupt."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in _ENDING if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
