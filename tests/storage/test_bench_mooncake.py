from __future__ import annotations

from kvhoist.bench import mooncake


def test_both_arms_move_every_byte_and_the_ratio_is_of_the_same_run() -> None:
    result = mooncake.run(smoke=True)
    assert result["smoke"]
    (size,) = result["sizes"]
    for way in ("put", "get"):
        figures = size[way]
        assert set(figures["gib_per_s"]) == {"raw", "store", "pool"}
        assert min(figures["gib_per_s"].values()) > 0
        ratio = figures["gib_per_s"]["store"] / figures["gib_per_s"]["raw"]
        assert abs(figures["ratio"]["store"] - ratio) < 0.01 * ratio + 0.01
