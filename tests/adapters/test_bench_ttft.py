"""`kvhoist bench ttft` at its smallest: it says what it measured, and refuses to time what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from kvhoist.adapters.transformers.prefix import Prefix
from kvhoist.bench import ttft
from kvhoist.bench.ttft_rig import Rig
from kvhoist.cli import app
from kvhoist.errors import ConfigError, KvhoistError
from kvhoist.platform.base import CPU


def test_the_smoke_benchmark_measures_every_arm_beside_the_link() -> None:
    done = CliRunner().invoke(app, ["bench", "ttft", "--smoke", "--json", "--prefix", "64", "--prefix", "32"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["bench"], result["smoke"], "pass" in result) == ("ttft", True, False)
    assert [row["prefix_tokens"] for row in result["results"]] == [32, 64]
    for row in result["results"]:
        assert row["bytes"] == row["prefix_tokens"] * 4 * 2 * 2 * 16 * 4  # layers, K and V, heads, dimension, float32
        assert min(row[f"{arm}_ms"] for arm in (*ttft.ARMS, "link")) > 0
        assert row["same_bits"] is True
        assert row["off_recompute"] < 1e-3


def test_a_load_that_changes_a_bit_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Prefix.fill

    def a_little_off(prefix: Prefix, layer: int, contiguous: Any, row: int, column: int) -> None:
        late = bool(prefix.lease.transfers)
        fill(prefix, layer, contiguous, row, column)
        if late and layer == 2:
            contiguous.layers[layer].buffers["keys"][row, 0, column, 0] += 1e-3

    monkeypatch.setattr(Prefix, "fill", a_little_off)
    with pytest.raises(KvhoistError, match="load_layerwise: the first token or its logits"):
        ttft.run(CPU, smoke=True)


def test_a_prefix_in_another_tier_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "only_in_host", lambda rig: None)
    with pytest.raises(KvhoistError, match="load_whole: the prefix was not where this arm wants it"):
        ttft.run(CPU, smoke=True)


def test_prefixes_of_no_whole_pages_and_devices_that_are_too_slow_are_refused() -> None:
    with pytest.raises(ConfigError, match="whole pages"):
        ttft.run(CPU, smoke=True, prefixes=[60])
    done = CliRunner().invoke(app, ["bench", "ttft", "--device", "cpu"])
    assert done.exit_code == 2
    assert "an 8B model on the CPU takes hours" in done.output
