"""What the connector costs vLLM's scheduler: a sweep over running requests and new blocks.

Every figure is CPU time of the scheduler's thread, so that other processes do not count as cost; of several rounds the
least mean of a cell is kept. vLLM's own scheduling of the same steps is measured beside it.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhoist.demo.vllm_rig import SchedulerRig, StepCost
from kvhoist.demo.vllm_rig_config import RigOptions
from kvhoist.messages import JobKind

TARGET_STEP_US, TARGET_REQUEST_US, TARGET_BLOCK_US = 50.0, 0.3, 3.0
TARGET_IDLE_US = 20.0
_SHARED_REQUESTS = 64
_MICRO = 1e6


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of step: `running` requests that generate, and prompts that bring `prompt_blocks` new blocks a step,
    computed, or (`hits`) loaded from the host tier."""

    running: int
    prompt_blocks: int = 0
    hits: bool = False


_CELLS = (
    *(Cell(running) for running in (1, 8, 64, 256, 512)),
    *(Cell(running, blocks) for running in (1, 64, 512) for blocks in (16, 64, 256, 512)),
)
_FEW_CELLS = (Cell(512), Cell(64, 64), Cell(512, 512), Cell(64, 64, hits=True), Cell(512, 512, hits=True))
_SMOKE_CELLS = (Cell(1), Cell(8), Cell(1, 16), Cell(8, 16), Cell(1, 16, hits=True))


def run(*, smoke: bool = False, block_sizes: tuple[int, ...] = (16, 128)) -> dict[str, Any]:
    """Measure and return plain data: `worst` (a step of each block size), `cells`, `idle`, `shared_prefix`, `pass`."""
    sizes = block_sizes[:1] if smoke else block_sizes
    gc.collect()
    gc.freeze()  # as EngineCore does once it has started
    try:
        cells: list[dict[str, Any]] = []
        for block_tokens in sizes:
            cells += _sweep(RigOptions(block_tokens), _SMOKE_CELLS if smoke else (*_CELLS, *_FEW_CELLS[3:]), smoke)
        if not smoke:
            for more in ({"storage": True}, {"num_ranks": 8}):
                cells += _sweep(RigOptions(**more), _FEW_CELLS, smoke)
        worst = [_worst(block_tokens, cells) for block_tokens in sizes]
        idle = _idle(smoke)
        shared = _shared_prefix()
    finally:
        gc.unfreeze()
    return {
        "unit": "us of the scheduler thread's CPU time a step, connector calls only",
        "targets": {"step_us": TARGET_STEP_US, "request_us": TARGET_REQUEST_US, "block_us": TARGET_BLOCK_US},
        "worst": worst,
        "cells": cells,
        "idle": idle,
        "shared_prefix": shared,
        "pass": all(part["pass"] for part in (*worst, idle, shared)),
    }


def _sweep(options: RigOptions, cells: tuple[Cell, ...], smoke: bool) -> list[dict[str, Any]]:
    rounds, steps = (1, 6) if smoke else (3, 40)
    found: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in cells}
    with tempfile.TemporaryDirectory() as folder:
        rig = SchedulerRig(Path(folder), options)
        for _ in range(rounds):
            for cell in cells:
                found[cell].append(_row(rig, cell, _steps(rig, cell, steps)))
        rig.side.plane.audit()
        rig.close()
    return [min(rows, key=lambda row: row["us"]) for rows in found.values()]


def _steps(rig: SchedulerRig, cell: Cell, num_steps: int) -> list[StepCost]:
    """Bring the rig into the cell's steady state, and return what `num_steps` steps of it cost."""
    block_tokens = rig.options.block_tokens
    page_tokens = block_tokens * rig.page_blocks
    rig.limit(1 << 17)
    for i in range(cell.running):  # ends of pages spread over the steps to come
        rig.add(rig.prompt(1 + i * 7 % page_tokens), max_tokens=1 << 16)
    for _ in range(4):
        rig.step()
    fed = cell.prompt_blocks * block_tokens
    rig.limit(cell.running + fed if fed else 1 << 17)
    feed = _feeder(rig, cell, fed, num_steps)
    costs = []
    for i in range(num_steps + 8):
        feed()
        cost = rig.step()
        if i >= 8:
            costs.append(cost)
    rig.finish()
    return costs


def _feeder(rig: SchedulerRig, cell: Cell, fed: int, num_steps: int) -> Callable[[], None]:
    """Return what lets prompts arrive so that each step has `fed` tokens of them to compute (or to load)."""
    if not fed:
        return lambda: None
    page_tokens = rig.options.block_tokens * rig.page_blocks
    if not cell.hits:
        longest = max(64 * page_tokens, fed)

        def compute() -> None:
            if rig.num_prompt_tokens() < fed:
                rig.add(rig.prompt(longest), max_tokens=1)

        return compute
    known = [rig.prompt(fed + 1) for _ in range(4)]
    for prompt in known:
        rig.warm(prompt)
    turn = iter(known * (num_steps + 8))

    def load() -> None:
        rig.forget_device()
        rig.add(next(turn), max_tokens=1)

    return load


def _row(rig: SchedulerRig, cell: Cell, costs: list[StepCost]) -> dict[str, Any]:
    running = statistics.mean(cost.num_running for cost in costs)
    blocks = statistics.mean(cost.new_blocks for cost in costs)
    connector = statistics.mean(cost.connector_s for cost in costs) * _MICRO
    vllm = statistics.mean(cost.vllm_s for cost in costs) * _MICRO
    allowed = TARGET_STEP_US + TARGET_REQUEST_US * running + TARGET_BLOCK_US * blocks
    calls = {name for cost in costs for name in cost.calls}
    return {
        "block_tokens": rig.options.block_tokens,
        "kind": "load" if cell.hits else "prefill" if cell.prompt_blocks else "decode",
        "storage": rig.options.storage,
        "ranks": rig.options.num_ranks,
        "running": round(running, 1),
        "new_blocks": round(blocks, 1),
        "jobs": round(statistics.mean(cost.num_jobs for cost in costs), 1),
        "us": round(connector, 1),
        "longest_us": round(max(cost.connector_s for cost in costs) * _MICRO, 1),
        "vllm_us": round(vllm, 1),
        "of_target": round(connector / allowed, 2),
        "of_vllm": round(connector / vllm, 4),
        "us_by_call": {
            name: round(statistics.mean(cost.calls.get(name, 0.0) for cost in costs) * _MICRO, 1)
            for name in sorted(calls)
        },
    }


def _worst(block_tokens: int, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the step of a block size, over all kinds of steps, that takes most of what the targets allow it."""
    rows = [cell for cell in cells if cell["block_tokens"] == block_tokens]
    worst = max(rows, key=lambda row: row["of_target"])
    named = ("kind", "storage", "ranks", "running", "new_blocks", "us", "of_target")
    return {
        "block_tokens": block_tokens,
        **{name: worst[name] for name in named},
        "largest_of_vllm": max(row["of_vllm"] for row in rows),
        "pass": worst["of_target"] <= 1,
    }


def _idle(smoke: bool) -> dict[str, Any]:
    """Measure steps that have nothing to do, and steps in which 64 requests wait for another's load."""
    with tempfile.TemporaryDirectory() as folder:
        rig = SchedulerRig(Path(folder), RigOptions(answer_steps=20))
        rig.warm(rig.prompt(4096))
        rounds = [[rig.step().connector_s for _ in range(10 if smoke else 200)] for _ in range(5)]
        rig.close()
    idle = min(statistics.mean(costs) for costs in rounds) * _MICRO
    return {"us": round(idle, 2), "target_us": TARGET_IDLE_US, "pass": idle <= TARGET_IDLE_US}


def _shared_prefix() -> dict[str, Any]:
    """Let 64 requests arrive that begin with one prefix in the host tier, and count the loads."""
    with tempfile.TemporaryDirectory() as folder:
        rig = SchedulerRig(Path(folder), RigOptions(answer_steps=8))
        prefix = rig.prompt(4096)
        rig.warm(prefix)
        rig.forget_device()
        before = rig.jobs[JobKind.LOAD]
        for _ in range(_SHARED_REQUESTS):
            rig.add([*prefix, *rig.prompt(40)], max_tokens=2)
        waiting = [rig.step() for _ in range(6)]
        while rig.scheduler.has_unfinished_requests():
            rig.step()
        num_loads = rig.jobs[JobKind.LOAD] - before
        rig.side.plane.audit()
        rig.close()
    return {
        "requests": _SHARED_REQUESTS,
        "loads": num_loads,
        "us_a_waiting_step": round(min(cost.connector_s for cost in waiting[1:]) * _MICRO, 1),
        "pass": num_loads == 1,
    }
