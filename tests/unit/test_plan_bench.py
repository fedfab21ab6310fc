"""The copy benchmark runs at its smallest and says what it measured."""

from __future__ import annotations

import json

from kvhoist.bench import copy


def test_the_smoke_benchmark_reports_shares_of_the_peak() -> None:
    result = json.loads(json.dumps(copy.run(smoke=True)))
    assert {row["direction"] for row in result["results"]} == {"offload", "load"}
    for row in result["results"]:
        assert row["share_of_peak"] > 0
        assert row["bytes"] == 64 * 4 * 2 * 16 * 384
        assert row["engine"] == "reference"
    assert result["machine"]["cpus"] >= 1
