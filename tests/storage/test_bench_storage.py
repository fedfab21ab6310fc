from __future__ import annotations

import json
from pathlib import Path

from kvhoist.bench import storage


def test_the_benchmark_runs_small_and_leaves_nothing_behind(tmp_path: Path) -> None:
    result = storage.run(tmp_path, num_pages=300, page_bytes=[1 << 16], smoke=True)
    json.dumps(result)
    (size,) = result["sizes"]
    assert size["page_bytes"] == 1 << 16
    for direction in ("write", "read"):
        assert set(size[direction]["gib_per_s"]) == {"plain", "store", "pool"}
        assert all(ratio > 0 for ratio in size[direction]["ratio"].values())
    assert result["reindex"]["num_pages"] == 300
    assert result["reindex"]["pass"]
    assert result["disk"]
    assert list(tmp_path.iterdir()) == []
