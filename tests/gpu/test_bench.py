"""The copy benchmark on a GPU."""

from __future__ import annotations

from kvhoist.bench.copy_device import run
from kvhoist.platform.base import Device


def test_a_smoke_run_measures_every_arm_beside_the_peak() -> None:
    result = run(Device("cuda", 0), smoke=True)
    assert {row["arm"] for row in result["results"]} == {"offload", "load, 1 layer groups", "load, 4 layer groups"}
    for row in result["results"]:
        assert 0 < row["share_by_wall"] <= row["share_by_events"] < 1.5
        assert row["submit_us"] > 0
        assert row["peak_gib_s"] > 1
