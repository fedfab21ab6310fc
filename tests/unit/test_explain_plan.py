"""Which engine moves what, as `kvhoist explain-plan` tells it without a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from kvhoist.cli.main import app

MHA = ("--k-row-bytes", "1024", "--v-row-bytes", "1024")


def plans(*options: str) -> dict[str, Any]:
    ran = CliRunner().invoke(app, ["explain-plan", "--json", *options], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def engines(plan: dict[str, Any]) -> list[tuple[int, str, int]]:
    return [(choice["from_pages"], choice["engine"], choice["num_groups"]) for choice in plan["engines"]]


def test_small_loads_are_mapped_and_all_else_is_staged() -> None:
    told = plans(*MHA)  # 4 MiB a page
    assert engines(told["offload"]) == [(1, "staged", 1)]
    assert engines(told["load"]) == [(1, "mapped", 1), (4, "staged", 1), (32, "staged", 4)]
    assert told["load"]["min_run_bytes"] == 16 * 1024


def test_large_pages_are_staged_from_the_first_on_and_whole_where_layers_lie_scattered() -> None:
    told = plans("--k-row-bytes", "4096", "--v-row-bytes", "4096")  # 16 MiB a page
    assert engines(told["load"]) == [(1, "staged", 1), (8, "staged", 4)]
    whole = plans(*MHA, "--order", "page_first")
    assert {num_groups for _, _, num_groups in engines(whole["load"])} == {1}


def test_what_a_kernel_cannot_move_or_the_ring_not_hold_goes_by_dma() -> None:
    odd = plans("--k-row-bytes", "6", "--order", "page_first")
    assert [engine for _, engine, _ in engines(odd["load"])] == ["dma"]
    assert "multiples of 4 B" in odd["load"]["engines"][0]["why"]
    tight = plans(*MHA, "--staging-bytes", "16MiB")
    assert [engine for _, engine, _ in engines(tight["offload"])] == ["dma"]
    assert "a sixth of 16.0 MiB" in tight["offload"]["engines"][0]["why"]


def test_an_engine_that_is_asked_for_is_the_only_one() -> None:
    told = plans(*MHA, "--io-backend", "dma")
    assert {engine for _, engine, _ in engines(told["load"])} == {"dma"}
    assert {engine for _, engine, _ in engines(plans(*MHA, "--device", "cpu")["load"])} == {"reference"}


@pytest.mark.parametrize(("device", "quota"), [("cuda", 2), ("rocm", 16)])
def test_the_rounds_of_a_row_are_the_same_on_either_platform_and_the_quota_is_its_own(device: str, quota: int) -> None:
    for row, word in (("576", 16), ("1152", 16), ("584", 8), ("132", 4)):
        told = plans("--latent-row-bytes", row, "--order", "page_first", "--device", device)
        assert told["load"]["rounds"] == {"word_bytes": word, "unroll": 8, "round_bytes": 32 * word}
        assert told["offload"]["block_quota"] == quota
    odd = plans("--k-row-bytes", "6", "--order", "page_first", "--device", device)
    assert odd["load"]["rounds"] is None
    ran = CliRunner().invoke(app, ["explain-plan", *MHA, "--device", device], catch_exceptions=False)
    assert "rounds  32 lanes x 16 B = 512 B, 8 at once" in ran.output
    assert f"quota   {quota} blocks for mapped" in ran.output


@pytest.mark.parametrize(
    "options",
    [
        (),
        (*MHA, "--latent-row-bytes", "576"),
        (*MHA, "--page-tokens", "60"),
        (*MHA, "--device", "tpu"),
        ("--v-row-bytes", "4"),
    ],
)
def test_options_that_describe_no_cache_are_refused(options: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, ["explain-plan", *options]).exit_code == 2


def test_it_prints_what_the_log_says() -> None:
    ran = CliRunner().invoke(app, ["explain-plan", *MHA], catch_exceptions=False)
    assert "mapped (auto: loads below 16.0 MiB)" in ran.output
    assert "staged from 32 pages on in 4 layer groups" in ran.output
