"""The benchmarks on a GPU."""

from __future__ import annotations

import pytest

from kvhoist.bench import alloc, cold
from kvhoist.bench.copy_device import VARIANTS, run
from kvhoist.platform.base import Device


def test_a_smoke_run_measures_every_arm_beside_the_peak() -> None:
    result = run(Device("cuda", 0), smoke=True)
    assert {row["arm"] for row in result["results"]} == {str(variant) for variant in VARIANTS}
    for row in result["results"]:
        assert 0 < row["share_by_wall"] <= row["share_by_idle"]
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


def test_a_smoke_run_of_ttft_finds_every_bit_in_its_place() -> None:
    pytest.importorskip("transformers")
    from kvhoist.bench import ttft

    result = ttft.run(Device("cuda", 0), smoke=True)
    assert [row["prefix_tokens"] for row in result["results"]] == [64, 128]
    for row in result["results"]:
        assert row["same_bits"] is True
        assert row["off_recompute"] < 0.05
        assert min(row[f"{arm}_ms"] for arm in (*ttft.ARMS, "link")) > 0


@pytest.mark.parametrize(("num_new", "num_cached"), [(5, 0), (1, 90), (64, 300), (512, 4096)])
def test_flash_attention_after_a_prefix_is_causal_from_the_last_token_on(num_new: int, num_cached: int) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from ttft_support import assert_attends_as_a_mask_says

    assert_attends_as_a_mask_says(num_new, num_cached, torch.device("cuda"), torch.bfloat16, 3e-2)
