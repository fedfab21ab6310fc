"""How long a thread's calls take, and for how much of that the machine gave the thread no processor."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

_T = TypeVar("_T")


class Stopwatch:
    """Times calls of the thread that makes it; a context manager. Where the system does not tell how long a thread
    waits for a processor, that counts as 0."""

    def __init__(self) -> None:
        self._rows: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self._fd: int | None = None
        with suppress(OSError):
            self._fd = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)

    def __enter__(self) -> Stopwatch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def time(self, name: str, call: Callable[[], _T]) -> _T:
        """Return `call()`, and note under `name` how long it took."""
        queued = self._queued_s()
        began = time.perf_counter()
        answer = call()
        ended = time.perf_counter()
        self._rows[name].append((ended - began, self._queued_s() - queued))
        return answer

    def figures(self) -> dict[str, dict[str, Any]]:
        """Return by name the number of calls and their p50, p99, p99.9 and longest in ms; `p99_on_cpu_ms` leaves out
        the waits for a processor, which a machine that others use has more of."""
        found = {}
        for name, rows in self._rows.items():
            spans, queued = np.array(rows).T * 1e3
            p50, p99, p999 = np.percentile(spans, (50, 99, 99.9))
            figures = {
                "p50_ms": p50,
                "p99_ms": p99,
                "p99.9_ms": p999,
                "max_ms": spans.max(),
                "p99_on_cpu_ms": np.percentile(np.maximum(spans - queued, 0), 99),
            }
            found[name] = {"calls": len(spans), **{key: round(float(value), 3) for key, value in figures.items()}}
        return found

    def _queued_s(self) -> float:
        return 0.0 if self._fd is None else int(os.pread(self._fd, 64, 0).split()[1]) / 1e9
