"""How fast pinned host memory is made and given back: PinnedArena beside torch's `pin_memory=True`.

Every measurement has a process of its own, since pools of pinned memory keep what they have. On the CPU, where there is
nothing to pin, the same arena stands beside memory of numpy that is written once.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from typing import Any

from kvhoist.bench.facts import facts
from kvhoist.bench.process import run_fresh
from kvhoist.errors import HostMemoryError, MissingDependencyError
from kvhoist.memory.budget import host_budget
from kvhoist.platform.base import CPU, Device
from kvhoist.units import format_bytes

TARGET_RATIO = 4.0
"""Least rate, of torch's, from TARGET_BYTES on."""
TARGET_BYTES = 32 << 30

OURS = "arena"
_SMOKE_BYTES = 16 << 20
_CHILD = "kvhoist.bench.alloc_child"


def run(device: Device = CPU, *, gib: Sequence[int] = (), smoke: bool = False, repeats: int = 3) -> dict[str, Any]:
    """Make and give back `gib` GiB (each of them; default: 1, 8 and 32, on the CPU 1) in both arms, which take turns,
    and return plain data: medians of `repeats`. `smoke`: 16 MiB, once.

    Raises HostMemoryError where the largest does not fit, MissingDependencyError where torch is not there to compare
    with on a GPU, KvhoistError where a process fails.
    """
    on_gpu = device.type != CPU.type
    if on_gpu and importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("the other arm is torch's", remedy="Run: pip install torch, or use --device cpu.")
    arms = (OURS, "torch" if on_gpu else "numpy")
    sizes = [_SMOKE_BYTES] if smoke else [n << 30 for n in sorted(set(gib or ((1, 8, 32) if on_gpu else (1,))))]
    # torch takes a power of two, and nothing would stop it.
    _check_room(1 << (sizes[-1] - 1).bit_length() if on_gpu else sizes[-1])
    found: dict[tuple[int, str], list[dict[str, Any]]] = {(size, arm): [] for size in sizes for arm in arms}
    for repeat in range(1 if smoke else repeats):
        for size in sizes:
            for arm in arms if repeat % 2 == 0 else arms[::-1]:
                found[size, arm].append(run_fresh(_CHILD, arm, size, device.type, device.index))
    rows = [row_of(size, arm, answers) for (size, arm), answers in found.items()]
    ratios = [ratio_of(size, *(row for row in rows if row["bytes"] == size), on_gpu=on_gpu) for size in sizes]
    known = {"device": found[sizes[0], OURS][0]["device"]} if on_gpu else {}
    return {
        "bench": "alloc",
        "smoke": smoke,
        **facts(),
        **known,
        "arms": arms,
        "target_ratio": TARGET_RATIO,
        "repeats": 1 if smoke else repeats,
        "results": rows,
        "ratios": ratios,
        "pass": all(row["pass"] is not False for row in (*ratios, *rows)),
    }


def row_of(num_bytes: int, arm: str, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of what the processes of one arm and size answered (see `alloc_child`). `exact`: whether the
    kernel counts just `num_bytes` as locked or pinned; None where it counts nothing of it, as some drivers have it."""
    seconds = {name: statistics.median(answer[name] for answer in answers) for name in ("make_s", "close_s")}
    parts = {
        name: round(statistics.median(answer["parts"][name] for answer in answers), 4) for name in answers[0]["parts"]
    }
    grown = {name: int(statistics.median(a["grown"][name] for a in answers)) for name in ("VmLck", "VmPin", "VmRSS")}
    counted = max(grown["VmLck"], grown["VmPin"])
    exact = counted == num_bytes if counted > 0 else None
    return {
        "bytes": num_bytes,
        "arm": arm,
        "gib_s": round(num_bytes / seconds["make_s"] / (1 << 30), 3),
        "make_s": round(seconds["make_s"], 4),
        **parts,
        "close_s": round(seconds["close_s"], 4),
        "locked_bytes": grown["VmLck"],
        "pinned_bytes": grown["VmPin"],
        "resident_bytes": grown["VmRSS"],
        "left_bytes": int(statistics.median(answer["left_bytes"] for answer in answers)),
        "exact": exact,
        "pass": exact if arm == OURS else None,
    }


def ratio_of(num_bytes: int, ours: dict[str, Any], other: dict[str, Any], *, on_gpu: bool) -> dict[str, Any]:
    """Return how many times as fast as the other arm ours is, with the target where there is one for this size."""
    ratio = other["make_s"] / ours["make_s"]
    target = TARGET_RATIO if on_gpu and num_bytes >= TARGET_BYTES else None
    return {
        "bytes": num_bytes,
        "times_as_fast": round(ratio, 2),
        "target": target,
        "pass": None if target is None else ratio >= target,
    }


def _check_room(num_bytes: int) -> None:
    budget = host_budget()
    if num_bytes > budget.available_bytes:
        raise HostMemoryError(
            "the largest size does not fit in memory",
            got=format_bytes(num_bytes),
            expected=f"at most {format_bytes(budget.available_bytes)}, by {budget.tightest}",
            remedy="Give smaller ones with --gib.",
        )
