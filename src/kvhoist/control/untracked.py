"""Objects that Python's cyclic garbage collector need not look at.

A directory of a million pages holds a million entries, which live long and never form a cycle (an entry refers to its
parent and its space, neither refers back). A full collection that visits them stops the scheduler for 0.1 to 0.4 s.
gc.freeze() would help only until the entries have been replaced, and freezes the garbage of the whole process with
them. CPython's own PyObject_GC_UnTrack takes single objects out; reference counting frees them as before.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


def _untracker() -> Callable[[Any], None] | None:
    if sys.implementation.name != "cpython":
        return None
    function = ctypes.pythonapi.PyObject_GC_UnTrack
    function.argtypes = [ctypes.py_object]
    function.restype = None
    return function


def _leave(_: Any) -> None:
    """Other Pythons: their collectors do not stop for long, or not in this way."""


untrack_one: Callable[[Any], None] = _untracker() or _leave
"""Take one container object, which is in no cycle and never will be, out of the collector's lists. About 0.25 µs."""


def untrack_all(containers: Iterable[Any]) -> None:
    """Take each of the container objects out of the collector's lists."""
    deque(map(untrack_one, containers), maxlen=0)


def untrack(container: _T) -> _T:
    """Return `container`, untracked."""
    untrack_one(container)
    return container
