"""What an engine's thread feels of storage: its calls while storage is idle and while it is busy, in turns."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvhoist.bench.engine_side import EngineSide
from kvhoist.bench.shapes import Shape
from kvhoist.bench.stopwatch import Stopwatch
from kvhoist.storage.file import FileStore

STORE_PAGES = 1024
TARGET_MS = 1.0
"""How much longer than idle the 99th percentile may be."""

_SHAPES = (Shape(False, 1024, 8), Shape(False, 1024, 16), Shape(False, 1024, 32))
SMOKE_SHAPE = Shape(False, 256, 1)


def measure(scratch: Path, smoke: bool) -> list[dict[str, Any]]:
    """Return rows of percentiles by page size (1, 2 and 4 MiB), arm and call.

    `idle`: nothing but the engine's own loads. `load`: batches of 64 pages are persisted and prefetched without a
    pause, at `gib_per_s`. Windows of both take turns. The rows of `load` say whether they keep the bar: `idle`'s p99
    and 1 ms. What was built is hidden from Python's garbage collector, as vLLM and SGLang do.
    """
    rounds, window_s = (1, 0.2) if smoke else (12, 2.0)
    rows = []
    for shape in (SMOKE_SHAPE,) if smoke else _SHAPES:
        with FileStore(scratch / str(shape), capacity=STORE_PAGES * shape.group.page_pitch_bytes) as store:
            side = EngineSide(store, shape)
            moved_pages, loaded_s = 0, 0.0
            with Stopwatch() as idle, Stopwatch() as load, frozen():
                for _ in range(rounds):
                    side.run(window_s, idle)
                    before = side.moved_pages()
                    with side.load():
                        side.run(window_s, load)
                        moved_pages += sum(side.moved_pages()) - sum(before)
                    loaded_s += window_s
            side.close()
        rate = moved_pages * shape.group.page_bytes / loaded_s / (1 << 30)
        rows += _rows(shape.group.page_bytes, idle, load, rate)
    return rows


@contextmanager
def frozen() -> Iterator[None]:
    """Keep what is there now from being looked at by the garbage collector."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _rows(page_bytes: int, idle: Stopwatch, load: Stopwatch, gib_per_s: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    quiet, busy = idle.figures(), load.figures()
    for call, figures in quiet.items():
        bars = {"target_ms": round(figures["p99_ms"] + TARGET_MS, 3), "gib_per_s": round(gib_per_s, 3)}
        rows.append({"page_bytes": page_bytes, "call": call, "arm": "idle", **figures})
        kept = busy[call]["p99_ms"] <= bars["target_ms"]
        rows.append({"page_bytes": page_bytes, "call": call, "arm": "load", **busy[call], **bars, "pass": kept})
    return rows
