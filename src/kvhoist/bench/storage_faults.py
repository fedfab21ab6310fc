"""What an engine's thread feels of a store that fails, what that costs in page ids, and how soon storage is back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvhoist.bench.engine_side import EngineSide
from kvhoist.bench.faulty_store import FAULTS, FaultyStore
from kvhoist.bench.mooncake_cluster import Cluster, has_mooncake, running_cluster
from kvhoist.bench.shapes import Shape
from kvhoist.bench.stopwatch import Stopwatch
from kvhoist.bench.storage_match import SMOKE_SHAPE, STORE_PAGES, frozen
from kvhoist.storage.base import Store
from kvhoist.storage.file import FileStore
from kvhoist.storage.mooncake import MooncakeStore

TARGET_MS = 1.0
"""What an engine's call may take at the 99th percentile while a store fails."""

_SHAPE = Shape(False, 1024, 8)
_SLOW_S, _LASTS_S, _HEALTHY_S = 10.0, 15.0, 4.0
_SMOKE_SLOW_S, _SMOKE_LASTS_S, _SMOKE_HEALTHY_S = 0.2, 0.4, 0.2
_PATIENCE_S = 120.0
_POLL_S = 0.005

_Fault = Callable[[], AbstractContextManager[None]]


def measure(scratch: Path, smoke: bool) -> dict[str, Any]:
    """Break a FileStore in every way of FAULTS while storage is busy and an engine works, and, where it is installed,
    kill and stop the master of a Mooncake Store.

    `fault_calls`: percentiles by fault and call, while the store was healthy and while it was not. `faults`: for how
    long it lasted, the page ids lost by it, and how long after its end a page was persisted and one prefetched again.
    """
    shape = SMOKE_SHAPE if smoke else _SHAPE
    slow_s = _SMOKE_SLOW_S if smoke else _SLOW_S
    bench = _Faults(shape, *((_SMOKE_HEALTHY_S, _SMOKE_LASTS_S) if smoke else (_HEALTHY_S, _LASTS_S)))
    with FileStore(scratch / "faults", capacity=STORE_PAGES * shape.group.page_pitch_bytes) as store:
        faulty = FaultyStore(store, slow_s)
        bench.run(faulty, {fault: partial(faulty.broken, fault) for fault in FAULTS})
    if has_mooncake():
        with running_cluster(STORE_PAGES * shape.group.page_pitch_bytes + (64 << 20)) as cluster:
            shared = MooncakeStore(cluster.options)
            bench.run(shared, {"killed": partial(_killed, cluster), "hangs": partial(_stopped, cluster)})
            shared.close()
    return {"fault_calls": bench.calls, "faults": bench.faults}


class _Faults:
    def __init__(self, shape: Shape, healthy_s: float, lasts_s: float) -> None:
        self.calls: list[dict[str, Any]] = []
        self.faults: list[dict[str, Any]] = []
        self._shape = shape
        self._healthy_s = healthy_s
        self._lasts_s = lasts_s

    def run(self, store: Store, faults: dict[str, _Fault]) -> None:
        side = EngineSide(store, self._shape)
        with frozen():
            for name, fault in faults.items():
                self._one(side, {"store": store.name, "fault": name}, fault)
        side.close()

    def _one(self, side: EngineSide, names: dict[str, Any], fault: _Fault) -> None:
        with Stopwatch() as healthy, Stopwatch() as faulty, side.load():
            side.run(self._healthy_s, healthy)
            began = time.perf_counter()
            with fault():
                side.run(self._lasts_s, faulty)
            lasted_s = time.perf_counter() - began
            persisted_s, prefetched_s = _recovery(side)
        usual = healthy.figures()
        for call, figures in faulty.figures().items():
            kept = figures["p99_ms"] <= TARGET_MS
            bars = {"healthy_p99_ms": usual[call]["p99_ms"], "target_ms": TARGET_MS, "pass": kept}
            self.calls.append({**names, "call": call, **figures, **bars})
        lost = side.lost_pages()
        self.faults.append(
            {
                **names,
                "lasted_s": round(lasted_s, 2),
                "lost_pages": lost,
                "persisted_again_s": persisted_s,
                "prefetched_again_s": prefetched_s,
                "pass": lost == 0 and persisted_s is not None and prefetched_s is not None,
            }
        )


def _recovery(side: EngineSide) -> tuple[float | None, float | None]:
    """Return after how many seconds a page was persisted and one prefetched again; None for never."""
    began = time.perf_counter()
    before = side.moved_pages()
    again: list[float | None] = [None, None]
    while None in again and time.perf_counter() < began + _PATIENCE_S:
        time.sleep(_POLL_S)
        for i, (now, then) in enumerate(zip(side.moved_pages(), before, strict=True)):
            if now > then and again[i] is None:
                again[i] = round(time.perf_counter() - began, 3)
    return again[0], again[1]


@contextmanager
def _killed(cluster: Cluster) -> Iterator[None]:
    cluster.kill()
    yield
    cluster.start()


@contextmanager
def _stopped(cluster: Cluster) -> Iterator[None]:
    cluster.stop()
    yield
    cluster.go_on()
