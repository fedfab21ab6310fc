"""FileStore by O_DIRECT and through the page cache, by page size: what `direct=auto` chooses by."""

from __future__ import annotations

import os
import random
import shutil
import statistics
from pathlib import Path
from typing import Any

from kvhoist.bench.storage_speed import BATCH_PAGES, IN_FLIGHT, aligned_bytes, pool
from kvhoist.errors import StoreUnavailableError
from kvhoist.storage.file import FileStore

_PAGE_BYTES = tuple(1 << bits for bits in range(12, 21))
_SMOKE_PAGE_BYTES = (1 << 13,)
_MOST_BATCHES = 64
_ROUND_BYTES = 128 << 20
_WAYS = ("write", "read")


def measure(scratch: Path, smoke: bool) -> list[dict[str, Any]]:
    """Return rows by page size (4 KiB to 1 MiB) and way: GiB/s of the I/O pool with `direct` on and off, both with an
    fdatasync inside of a write's time and the page cache dropped before a read, and `off_over_on`, the median of the
    ratios of rounds in which both take turns. No rows where there is no O_DIRECT."""
    try:
        FileStore(scratch / "probe", capacity="1MiB", direct="on").close()
    except StoreUnavailableError:
        return []
    rows = []
    for page_bytes in _SMOKE_PAGE_BYTES if smoke else _PAGE_BYTES:
        rates = _rates(scratch, page_bytes, 1 if smoke else 9)
        for way, name in enumerate(_WAYS):
            ratios = [off[way] / on[way] for on, off in zip(rates["on"], rates["off"], strict=True)]
            medians = {mode: statistics.median(rate[way] for rate in rows) for mode, rows in rates.items()}
            rows.append(
                {
                    "page_bytes": page_bytes,
                    "way": name,
                    **{f"{mode}_gib_per_s": round(rate / (1 << 30), 4) for mode, rate in medians.items()},
                    "off_over_on": round(statistics.median(ratios), 2),
                    "rounds": len(ratios),
                }
            )
    return rows


def _rates(scratch: Path, page_bytes: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    batch, *targets = (aligned_bytes(BATCH_PAGES * page_bytes) for _ in range(1 + IN_FLIGHT))
    num_batches = max(IN_FLIGHT, min(_MOST_BATCHES, _ROUND_BYTES // batch.nbytes))
    rates: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    order = random.Random(0)
    for _ in range(rounds):
        for mode in order.sample(list(rates), len(rates)):
            os.sync()  # else one pays for what the other wrote or deleted
            seconds = pool(scratch / "pages", batch, targets, page_bytes, num_batches, mode)
            shutil.rmtree(scratch / "pages")
            rates[mode].append((num_batches * batch.nbytes / seconds[0], num_batches * batch.nbytes / seconds[1]))
    return rates
