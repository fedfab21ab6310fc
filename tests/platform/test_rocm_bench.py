"""The benchmarks of a device on the simulated HIP runtime: they run there as on any GPU, and say what it is."""

from __future__ import annotations

import time
from typing import Any

import pytest
from device_rank import DEADLINE_S

from kvhoist.bench import copy_device, duplex, submit, timing
from kvhoist.bench.shapes import SMOKE
from kvhoist.errors import DeviceError
from kvhoist.platform.base import Device
from kvhoist.platform.gpu_timing import StreamTimer
from kvhoist.platform.rocm import RocmPlatform

DEVICE = Device("cuda", 0)


@pytest.mark.parametrize("bench", [copy_device, duplex, submit], ids=lambda bench: bench.__name__.rpartition(".")[2])
def test_a_benchmark_runs_on_either_vendors_gpu(hip: Any, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LEAD_BYTES", 1 << 20)
    monkeypatch.setattr(bench, "_NUM_PAGES", 2)
    monkeypatch.setattr(bench, "SMOKE", SMOKE[:1])
    result = bench.run(DEVICE, smoke=True)
    assert result["results"]
    assert result["device"]["name"] == "simulated GPU 0"
    assert result["device"]["target"] == "gfx942"
    assert result["device"]["driver"].endswith("HIP 7.2")


def test_a_timer_tells_the_time_between_two_points_of_a_stream(platform: RocmPlatform, hip: Any) -> None:
    stream, timer, seen = platform.make_stream(), timing.make_timer(platform), []
    assert isinstance(timer, StreamTimer)
    timer.start(stream)
    for _ in range(2):  # work in between, which looks at the same clock
        hip.enqueue(stream, lambda: seen.append(time.monotonic()))
    timer.stop(stream)
    passed = timer.seconds()
    assert 0.999 * (seen[1] - seen[0]) <= passed <= DEADLINE_S


def test_a_timer_that_cannot_be_read_is_an_error(platform: RocmPlatform, hip: Any) -> None:
    stream, timer = platform.make_stream(), timing.make_timer(platform)
    timer.start(stream)
    timer.stop(stream)
    hip.fail("hipEventElapsedTime")
    with pytest.raises(DeviceError, match="HIP failed in reading a timer"):
        timer.seconds()
