"""What the first transfer of a fresh process costs where no compiled kernel is kept yet, beside one where it is.

Every run has a process of its own, and arms take turns. One unmeasured run comes first: it fills the warm folder, and
brings the libraries from disk for all. The CPU platform compiles nothing; there the arms differ by chance.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from kvhoist.bench.facts import facts
from kvhoist.bench.process import run_fresh
from kvhoist.platform.base import CPU, Device

TARGET_S = 0.5
"""Most seconds by which a first transfer may be later for want of a compiled kernel."""

PHASES = (
    "start_s",
    "open_s",
    "build_s",
    "first_offload_s",
    "first_load_s",
    "second_offload_s",
    "second_load_s",
)
FIRST_TRANSFER = ("build_s", "first_offload_s", "first_load_s")
COLD, WARM, UNWRITABLE = "empty cache folder", "kernels in the cache folder", "cache folder that cannot be written"

_CHILD = "kvhoist.bench.cold_child"


def run(device: Device = CPU, *, smoke: bool = False, repeats: int = 5) -> dict[str, Any]:
    """Measure all arms in fresh processes and return plain data: medians of `repeats`, in seconds by phase. `smoke`:
    once. Raises KvhoistError where a process fails, or its pages came back with other bytes."""
    on_gpu = device.type != CPU.type
    repeats = 1 if smoke else repeats
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in (COLD, WARM, *((UNWRITABLE,) if on_gpu else ()))}
    with tempfile.TemporaryDirectory(prefix="kvhoist-bench-") as scratch:
        warm = Path(scratch) / "warm"
        first = _once(device, warm)
        for number in range(repeats):
            for arm, answers in found.items():
                folder = warm if arm == WARM else Path(scratch) / f"{arm} {number}"
                if arm == UNWRITABLE:
                    folder.mkdir()
                    (folder / "kernels").touch()  # a file in its place: modes do not stop root
                answers.append(_once(device, folder))
    rows = [row_of(arm, answers) for arm, answers in found.items()]
    later_s = rows[0]["first_transfer_s"] - rows[1]["first_transfer_s"]
    return {
        "bench": "cold",
        "smoke": smoke,
        **facts(),
        **({"device": first["device"]} if on_gpu else {}),
        "pages": first["pages"],
        "bytes": first["bytes"],
        "repeats": repeats,
        "results": rows,
        "compared_with": WARM,
        "cold_minus_warm_s": round(later_s, 4),
        "target_s": TARGET_S,
        "pass": later_s <= TARGET_S,
    }


def row_of(arm: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an arm's medians, and that of the first transfer: from the building to the end of the first load."""
    first = statistics.median(sum(answer[name] for name in FIRST_TRANSFER) for answer in answers)
    phases = {name: round(statistics.median(answer[name] for answer in answers), 4) for name in PHASES}
    return {"arm": arm, "first_transfer_s": round(first, 4), **phases}


def _once(device: Device, cache_dir: Path) -> dict[str, Any]:
    environment = {"KVHOIST_CACHE_DIR": str(cache_dir)}
    return run_fresh(_CHILD, device.type, device.index, time.monotonic_ns(), environment=environment)
