"""Which cores kvhoist's own threads run on: those of the thread that makes them, unless an engine bound it to one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_TASKS = "/proc/self/task"


@contextmanager
def on_any_core() -> Iterator[None]:
    """Let threads that are started within run on every core that some thread of this process may run on, where the
    calling thread is bound to a single one.

    A thread inherits the cores of the one that starts it, and an engine may have bound that to a core of its own (vLLM
    on CPUs does): all of kvhoist's threads would wait there for each other and for the engine. Of several cores, as of
    the NUMA node of a GPU, they are to be. What the whole process was given (by taskset, numactl or a container) stays
    its bound. The caller's own cores are as before afterwards.
    """
    own = os.sched_getaffinity(0)
    cores = own | _cores_of_process() if len(own) == 1 else own
    if cores == own:
        yield
        return
    with suppress(OSError):  # not allowed here: they inherit, as ever
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, own)


def start(*threads: threading.Thread) -> None:
    """Start threads `on_any_core`."""
    with on_any_core():
        for thread in threads:
            thread.start()


def _cores_of_process() -> set[int]:
    cores: set[int] = set()
    with suppress(OSError):
        for task in os.listdir(_TASKS):
            with suppress(OSError):  # it has ended
                cores |= os.sched_getaffinity(int(task))
    return cores
