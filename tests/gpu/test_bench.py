"""The benchmarks on a GPU."""

from __future__ import annotations

from kvhoist.bench import alloc, cold
from kvhoist.bench.copy_device import run
from kvhoist.platform.base import Device


def test_a_smoke_run_measures_every_arm_beside_the_peak() -> None:
    result = run(Device("cuda", 0), smoke=True)
    assert {row["arm"] for row in result["results"]} == {"offload", "load, 1 layer groups", "load, 4 layer groups"}
    for row in result["results"]:
        assert 0 < row["share_by_wall"] <= row["share_by_events"] < 1.5
        assert row["submit_us"] > 0
        assert row["peak_gib_s"] > 1
    assert result["device"]["name"]
    assert result["device"]["multiprocessors"] > 0


def test_pinned_memory_is_measured_beside_torchs_and_given_back() -> None:
    result = alloc.run(Device("cuda", 0), smoke=True)
    assert [row["arm"] for row in result["results"]] == ["arena", "torch"]
    ours = result["results"][0]
    assert ours["exact"] is not False
    assert ours["resident_bytes"] > ours["bytes"] * 0.9
    assert ours["left_bytes"] < ours["bytes"] // 2
    assert result["device"]["name"]


def test_a_first_transfer_works_whatever_the_cache_folder_holds() -> None:
    result = cold.run(Device("cuda", 0), smoke=True)
    assert [row["arm"] for row in result["results"]] == [cold.COLD, cold.WARM, cold.UNWRITABLE]
    assert result["device"]["name"]
