"""The directory's benchmark runs, and every figure has a value, a unit and a verdict."""

from __future__ import annotations

import json

from kvhoist.bench import directory


def test_smoke_run_gives_every_figure_as_plain_data() -> None:
    result = json.loads(json.dumps(directory.run(smoke=True)))
    figures = {figure["name"]: figure for figure in result["figures"]}
    assert {"match_pin_unpin", "match_of_10k", "insert_runs", "insert_evict_agentic", "longest_call"} <= figures.keys()
    assert {"memory_runs", "memory_branches", "hash", "insert_evict_agentic_arc"} <= figures.keys()
    for figure in figures.values():
        assert figure["value"] > 0
        assert figure["unit"]
        assert figure["pass"] == (None if figure["target"] is None else figure["value"] <= figure["target"])
    assert result["num_pages"] < 100_000
    assert result["machine"]["python"]
