"""Work like a model's, to be measured alone and beside copies: kernels in a captured graph, or numpy in a thread."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import numpy as np

from kvhoist.platform.base import Platform


class Compute(Protocol):
    """A window of work, begun again and again. One at a time."""

    def start(self) -> None:
        """Begin a window; it runs beside the caller."""
        ...

    def done(self) -> bool: ...

    def seconds(self) -> float:
        """Block until the window has ended and return how long it took."""
        ...


def make_computes(platform: Platform) -> dict[str, Compute]:
    """Return the kinds of work by name. Raises MissingDependencyError for a GPU without torch."""
    if not platform.capabilities.asynchronous:
        return {"matmul": _NumpyCompute()}
    from kvhoist.bench.gpu_compute import gemm, gemv

    index = platform.device.index
    return {"GEMM 8192^3 bf16": gemm(index), "GEMV over 64 matrices of 128 MiB": gemv(index)}


class _NumpyCompute:
    """Products of small matrices in a thread: only to see that the measurement runs."""

    def __init__(self) -> None:
        self._matrix: Any = np.ones((128, 128), dtype=np.float32)
        self._thread = threading.Thread()
        self._seconds = 0.0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def seconds(self) -> float:
        self._thread.join()
        return self._seconds

    def _run(self) -> None:
        began = time.perf_counter()
        for _ in range(50):
            self._matrix @ self._matrix
        self._seconds = time.perf_counter() - began
