"""What kvhoist costs an engine that has nothing to gain from it: tokens a second with and without, no prompt reused.

Each arm is an engine in a process of its own, all on the same cores with the same number of threads. They take turns, a
short window each, in an order that rotates; an arm's window begins when the one before it rests. A round is some
windows of every arm, so that what else the machine does falls on all of them; a ratio is of one round.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvhoist.demo.child import ServerFailedError
from kvhoist.demo.vllm_server import kvhoist_connector
from kvhoist.demo.vllm_window import WindowSpec

TARGET = 0.98
_END_TIMEOUT_S = 30.0
_T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t, two-sided 95 %, by degrees of freedom from 1 on."""


@dataclass(frozen=True, slots=True)
class ThroughputOptions:
    """The model and its load. `host_bytes` is the host tier of the arms that have one, so small that it is full, and
    its memory backed, after `warm_up_windows`; `arms` are compared with an engine without a connector."""

    model: Path
    dtype: str
    rounds: int = 10
    windows: int = 2
    requests: int = 8
    prompt_tokens: int = 128
    new_tokens: int = 24
    block_tokens: int = 32
    host_bytes: str = "128MiB"
    warm_up_windows: int = 5
    arms: tuple[str, ...] = ("host", "host and disk")

    @property
    def device_blocks(self) -> int:
        """Blocks for a window and a half: those of the window before are given away."""
        return 1 + 3 * self.requests * math.ceil((self.prompt_tokens + self.new_tokens) / self.block_tokens) // 2


def run(options: ThroughputOptions, on_step: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure and return plain data. Raises ServerFailedError where an engine does not start."""
    with tempfile.TemporaryDirectory(prefix="kvhoist-bench-") as scratch, ExitStack() as running:
        on_step("starting the engines")
        arms = {}
        for name, connector in _connectors(options, Path(scratch)).items():
            arms[name] = _Arm(_spec(options, connector), Path(scratch) / f"{name}.log")
            running.callback(arms[name].close)
        warm = options.warm_up_windows
        _round(arms, range(warm))
        rounds = []
        for number in range(options.rounds):
            on_step(f"round {number + 1} of {options.rounds}")
            first = warm + number * options.windows
            rounds.append(_round(arms, range(first, first + options.windows)))
    names = list(arms)
    results = [_result(name, rounds) for name in names[1:]]
    return {
        "model": options.model.name,
        "dtype": options.dtype,
        "load": f"{options.requests} prompts of {options.prompt_tokens} tokens at once, all different, "
        f"{options.new_tokens} new tokens each; {options.device_blocks} blocks of {options.block_tokens} tokens",
        "threads": _threads(),
        "rounds": options.rounds,
        "windows_a_round": options.windows,
        "baseline_tokens_per_s": round(statistics.median(_rate(one[names[0]]) for one in rounds), 2),
        "interval": "95 %, Student's t over the rounds' ratios",
        "target_ratio": TARGET,
        "arms": results,
        "pass": all(result["pass"] for result in results),
    }


def _round(arms: dict[str, _Arm], windows: range) -> dict[str, dict[str, float]]:
    """Let the arms take turns, a window a number each, and return what each came to in all."""
    names = list(arms)
    total: dict[str, Counter[str]] = {name: Counter() for name in names}
    for number in windows:
        for i in range(len(names)):
            name = names[(number + i) % len(names)]
            total[name].update(arms[name].window(number))
    return {name: dict(counts) for name, counts in total.items()}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of `values` and half of its 95 % interval by Student's t (the normal's beyond 15 degrees)."""
    if len(values) < 2:
        return values[0], math.inf
    degrees = len(values) - 1
    t = _T_95[degrees - 1] if degrees <= len(_T_95) else 2.12
    return statistics.mean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def _threads() -> dict[str, str]:
    """The same cores and threads for every arm: a connector takes a core away unless they are named. Threads that wait
    sleep: those of an arm whose turn it is not must not take the cores of the others."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(len(cores)),
        "OMP_WAIT_POLICY": "passive",
    }


def _connectors(options: ThroughputOptions, scratch: Path) -> dict[str, dict[str, Any] | None]:
    host = {"host_bytes": options.host_bytes}
    store = f"file:{scratch / 'store'}?capacity=2GiB"
    settings = {"host": host, "host and disk": {**host, "storage": store}}
    return {"none": None, **{name: kvhoist_connector(**settings[name]) for name in options.arms}}


def _spec(options: ThroughputOptions, connector: dict[str, Any] | None) -> WindowSpec:
    return WindowSpec(
        model=str(options.model),
        dtype=options.dtype,
        device_blocks=options.device_blocks,
        block_tokens=options.block_tokens,
        requests=options.requests,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        connector=connector,
    )


class _Arm:
    """An engine's process. It starts at once; the first window waits until the engine stands."""

    def __init__(self, spec: WindowSpec, log: Path) -> None:
        variables = {**_threads(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
        self._log = log
        self._ready = False
        with log.open("wb") as messages:
            self._process = subprocess.Popen(
                [
                    *("env", *(f"{variable}={value}" for variable, value in variables.items())),
                    *(sys.executable, "-m", "kvhoist.demo.vllm_window", spec.to_json()),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
            )

    def window(self, seed: int) -> dict[str, float]:
        """Run one window. Raises ServerFailedError where the process has ended."""
        self._ready = self._ready or bool(self._read())
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process: of its own accord where it can."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S if self._ready else 0)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-25:])
            raise ServerFailedError("an engine of the benchmark ended", got=f"status {self._process.wait()}", tail=tail)
        found: dict[str, float] = json.loads(line)
        return found


def _rate(window: dict[str, float]) -> float:
    return window["tokens"] / window["seconds"]


def _result(name: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    ratios = [_rate(one[name]) / _rate(one["none"]) for one in rounds]
    cpu = [one["none"]["cpu_s"] / one[name]["cpu_s"] for one in rounds]
    mean, half = interval(ratios)
    cpu_mean, cpu_half = interval(cpu)
    return {
        "arm": name,
        "ratio": round(mean, 4),
        "interval": [round(mean - half, 4), round(mean + half, 4)],
        "median_ratio": round(statistics.median(ratios), 4),
        "cpu_ratio": round(cpu_mean, 4),
        "cpu_interval": [round(cpu_mean - cpu_half, 4), round(cpu_mean + cpu_half, 4)],
        "kvhoist_cpu_share": round(
            statistics.mean(one[name]["kvhoist_cpu_s"] / one[name]["cpu_s"] for one in rounds), 4
        ),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "tokens_per_s": round(statistics.median(_rate(one[name]) for one in rounds), 2),
        "cached_tokens": int(sum(one[name]["cached_tokens"] for one in rounds)),
        "drain_s": round(statistics.median(one[name]["drain_s"] for one in rounds), 2),
        "pass": mean >= TARGET,
    }


def smaller(options: ThroughputOptions) -> ThroughputOptions:
    """Return `options` made so small that a run takes seconds."""
    return replace(options, rounds=2, windows=1, requests=4, prompt_tokens=96, new_tokens=8, arms=("host and disk",))
