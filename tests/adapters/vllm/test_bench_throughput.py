"""`kvhoist bench vllm`: engines with and without kvhoist take turns, and the ratio is of what they did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvhoist.demo import vllm_throughput
from kvhoist.demo.child import ServerFailedError
from kvhoist.demo.vllm_throughput import ThroughputOptions


class FakeArm:
    """An engine that is 10 % slower with a connector, whatever the machine does meanwhile."""

    order: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, spec: Any, log: Path) -> None:
        self.name = log.stem
        self.slower = 1.1 if spec.connector else 1.0

    def window(self, seed: int) -> dict[str, float]:
        FakeArm.order.append((self.name, seed))
        seconds = (1 + seed % 3) * self.slower
        cpu = {"cpu_s": 2 * seconds, "kvhoist_cpu_s": 0.02 * seconds, "drain_s": 0.0}
        return {"seconds": seconds, "tokens": 100, "cached_tokens": 0, **cpu}

    def close(self) -> None: ...


def test_arms_take_turns_in_a_rotating_order_on_the_same_prompts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm_throughput, "_Arm", FakeArm)
    FakeArm.order.clear()
    result = vllm_throughput.run(ThroughputOptions(tmp_path, "float32", rounds=4, windows=3))
    turns = [FakeArm.order[i : i + 3] for i in range(0, len(FakeArm.order), 3)]
    assert len(turns) == 5 + 4 * 3
    assert all({name for name, _ in turn} == {"none", "host", "host and disk"} for turn in turns)
    assert len({seed for turn in turns for _, seed in turn}) == len(turns), "no prompt comes twice"
    assert [turn[0][0] for turn in turns[:6]] == ["none", "host", "host and disk"] * 2
    for arm in result["arms"]:
        assert arm["ratios"] == [pytest.approx(1 / 1.1, abs=1e-4)] * 4
        assert arm["cpu_ratio"] == pytest.approx(1 / 1.1, abs=1e-4)
        assert arm["kvhoist_cpu_share"] == 0.01
        assert not arm["pass"]
    assert not result["pass"]


def test_an_engine_that_does_not_start_says_so_with_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ServerFailedError, match="an engine of the benchmark ended"):
        vllm_throughput.run(ThroughputOptions(tmp_path, "float32"))


@pytest.mark.timeout(600)
def test_a_smoke_run_generates_in_two_real_engines() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from kvhoist.cli import main; main()"),
            *("bench", "vllm", "--smoke", "--json", "--part", "throughput"),
        ],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert "pass" not in result, "a smoke run tells nothing of targets"
    throughput = result["throughput"]
    assert [arm["arm"] for arm in throughput["arms"]] == ["host and disk"]
    for arm in throughput["arms"]:
        assert arm["tokens_per_s"] > 0
        assert 0 < arm["kvhoist_cpu_share"] < 1
        assert arm["cached_tokens"] == 0, "no prompt is reused"
