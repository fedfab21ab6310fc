"""What it costs when the kernel migrates pages of the host tier, on AMD's GPUs: registered memory beside the driver's.

Registered memory (`hipHostRegister`) is the process's own: pages may move, and then the driver evicts all queues of
the process until they are mapped anew. Memory of the driver's own (`hipHostMalloc`, GTT) cannot move. Both arms do the
same on one idle GPU, each in a process of its own, since HSA_USERPTR_FOR_PAGED_MEM decides before HIP starts: four
products of 4096 x 4096 matrices in bf16, a copy of 16 MiB to the device, wait for both; a second thread asks the kernel
three times to move 2 MiB of what is copied to another memory node and back, with 1,000 iterations after each.
"""

from __future__ import annotations

import importlib.util
import statistics
from typing import Any

import numpy as np

from kvhoist.bench.facts import facts
from kvhoist.bench.kfd import HostPid, check_kfd
from kvhoist.bench.migration_child import ENVIRONMENT, GTT, REGISTERED, SIMULATED
from kvhoist.bench.migration_loop import COPY_BYTES, MOVE_BYTES
from kvhoist.bench.numa import check_moves, memory_nodes
from kvhoist.bench.process import run_fresh
from kvhoist.errors import ConfigError, KvhoistError, MissingDependencyError
from kvhoist.platform.base import CPU, Device

TARGET_EVICTED_MS = 0
"""Of driver-owned memory: nothing moves, so no queue is evicted."""

STALL_TIMES = 10
"""An iteration that took so many times the median stalled."""

SIMULATED_NOTE = "SIMULATED: no GPU, no HIP, no page moved; this shows that the measurement runs and nothing else"

_ITERATIONS, _SMOKE_ITERATIONS = 1000, 60
_SMOKE_BYTES = 64 << 20
_CHILD = "kvhoist.bench.migration_child"


def run(
    device: Device, *, gib: int = 16, host_pid: HostPid = HostPid.FIND, smoke: bool = False, simulate: bool = False
) -> dict[str, Any]:
    """Measure both arms with a host tier of `gib` GiB and return plain data. `smoke`: 64 MiB and few iterations.

    `simulate` is a smoke run without a GPU: the CPU stands for it, and for the kernel a simulated one of two memory
    nodes; the result says `simulated`. Raises ConfigError or MissingDependencyError where it cannot run, KvhoistError
    where an arm says so, or other bytes arrived than were sent.
    """
    smoke = smoke or simulate
    if not simulate:
        check_machine(device)
    pool_bytes = _SMOKE_BYTES if smoke else gib << 30
    iterations = _SMOKE_ITERATIONS if smoke else _ITERATIONS
    where = SIMULATED if simulate else device.index
    answers = {arm: _arm(arm, where, pool_bytes, iterations, host_pid) for arm in (REGISTERED, GTT)}
    mark = " (simulated)" if simulate else ""
    rows = [{**row_of(arm, answer), "arm": arm + mark} for arm, answer in answers.items()]
    return {
        "bench": "migration",
        "smoke": smoke,
        "simulated": simulate,
        **({"note": SIMULATED_NOTE} if simulate else {}),
        **facts(),
        **({} if simulate else {"device": answers[GTT]["device"]}),
        "pool_bytes": pool_bytes,
        "copy_bytes": COPY_BYTES,
        "move_bytes": MOVE_BYTES,
        "iterations_after_each_attempt": iterations,
        "target_evicted_ms": TARGET_EVICTED_MS,
        "results": rows,
        "migrations": [
            {"arm": arm + mark, **move, "answers": _told(move["answers"]), "are": _told(move["are"])}
            for arm, answer in answers.items()
            for move in answer["migrations"]
        ],
        "pass": all(row["pass"] for row in rows),
    }


def check_machine(device: Device) -> None:
    """Raise ConfigError or MissingDependencyError, with the remedy, where this machine cannot measure it: no ROCm, no
    torch, fewer than two memory nodes, no right to move pages. What only HIP can tell, each arm checks."""
    if device.type == CPU.type:
        raise ConfigError(
            "the driver of AMD's GPUs stalls on moved pages, the CPU does not",
            got="--device cpu",
            choices=["cuda", "cuda:1", "--simulate"],
        )
    check_kfd()
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(
            "the products are torch's, which is not installed", remedy="Install torch for ROCm, or use --simulate."
        )
    check_moves(memory_nodes())


def _arm(arm: str, where: object, pool_bytes: int, iterations: int, host_pid: HostPid) -> dict[str, Any]:
    answer = run_fresh(_CHILD, arm, where, pool_bytes, iterations, host_pid, environment=ENVIRONMENT[arm])
    if "refused" in answer:
        raise KvhoistError(answer["refused"])
    return answer


def row_of(arm: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the figures and the verdict of an arm, from what its process answered (`migration_loop.measure`).

    `verdict` says in words what was not as it must be: of registered memory every page must move, or the other arm
    stands beside nothing; of driver-owned memory none, each refused with EFAULT, and no queue may be evicted.
    """
    times = np.array([second for part in answer["times_s"] for second in part]) * 1e3
    per_attempt = len(answer["times_s"][0])
    median, worst = statistics.median(times.tolist()), int(times.argmax())
    stalled = times[times > STALL_TIMES * median]
    wrong = _not_moved(answer) if arm == REGISTERED else _not_fixed(answer)
    return {
        "arm": arm,
        "host_pid": answer.get("host_pid"),
        "iterations": len(times),
        "median_ms": round(median, 4),
        "p99_ms": round(float(np.percentile(times, 99)), 4),
        "worst_ms": round(float(times[worst]), 4),
        "worst_is": f"iteration {worst % per_attempt + 1} after attempt {worst // per_attempt + 1}",
        "stalled_iterations": len(stalled),
        "stalled_ms": round(float(stalled.sum()), 4),
        "evicted_ms": round(answer["evicted_ms"], 4),
        "copies_compared": answer["compared"],
        "moved_pages": sum(move["moved"] for move in answer["migrations"]),
        "of_pages": sum(move["pages"] for move in answer["migrations"]),
        "verdict": "; ".join(wrong) or "as it must be",
        "pass": not wrong,
    }


def _not_moved(answer: dict[str, Any]) -> list[str]:
    return [
        f"attempt {move['attempt']}: {move['pages'] - move['moved']} of {move['pages']} pages did not move to node "
        f"{move['to_node']} ({_told(move['are'])})"
        for move in answer["migrations"]
        if move["moved"] != move["pages"]
    ]


def _not_fixed(answer: dict[str, Any]) -> list[str]:
    found = [
        f"attempt {move['attempt']}: pages that must not be movable answered {_told(move['answers'])}"
        for move in answer["migrations"]
        if move["answers"] != {"EFAULT": move["pages"]} or move["moved"]
    ]
    if answer["evicted_ms"] > TARGET_EVICTED_MS:
        found.append(f"queues were evicted for {answer['evicted_ms']:g} ms")
    return found


def _told(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
