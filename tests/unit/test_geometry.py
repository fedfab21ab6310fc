"""What a page is, and every way of describing one that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvhoist.errors import GeometryError, UnsupportedGeometryError
from kvhoist.geometry import (
    HOST_PAGE_ALIGNMENT,
    SNAPSHOT,
    CacheGeometry,
    CacheGroup,
    Component,
    Reuse,
    window,
)

K = Component("k", (0, 1), 8)


def test_a_page_holds_all_rows_of_all_components() -> None:
    group = CacheGroup((K, Component("scale", (1,), 2)), page_tokens=8, blocks_per_page=2)
    assert group.layers == (0, 1)
    assert group.block_tokens == 4
    assert group.page_bytes == 8 * (2 * 8 + 2)
    assert group.page_pitch_bytes == HOST_PAGE_ALIGNMENT
    assert group.rows_per_page(K) == 8
    assert group.rows_per_block(K) == 4
    assert group.component("scale").row_bytes == 2


def test_the_page_pitch_is_the_least_multiple_of_4_kib() -> None:
    exact = CacheGeometry.attention(1, k_row_bytes=1024, v_row_bytes=0, page_tokens=4).groups[0]
    over = CacheGeometry.attention(1, k_row_bytes=1025, v_row_bytes=0, page_tokens=4).groups[0]
    assert (exact.page_pitch_bytes, over.page_pitch_bytes) == (4096, 8192)


def test_constructors_describe_their_families() -> None:
    def names(geometry: CacheGeometry) -> list[str]:
        return [component.name for component in geometry.groups[0].components]

    assert names(CacheGeometry.attention(2, k_row_bytes=8, v_row_bytes=4, page_tokens=4)) == ["k", "v"]
    assert names(CacheGeometry.attention(2, k_row_bytes=8, v_row_bytes=0, page_tokens=4)) == ["k"]
    with_scales = CacheGeometry.attention((0, 3), k_row_bytes=8, v_row_bytes=8, page_tokens=4, scale_row_bytes=2)
    assert names(with_scales) == ["k", "v", "k_scale", "v_scale"]
    assert with_scales.groups[0].layers == (0, 3)
    latent = CacheGeometry.latent(2, row_bytes=576, page_tokens=4, index_row_bytes=128, scale_row_bytes=16)
    assert names(latent) == ["latent", "index_k", "scale"]
    opaque = CacheGeometry.opaque(2, block_bytes=100, block_tokens=16, blocks_per_page=4)
    assert names(opaque) == ["block"]
    assert opaque.page_bytes == opaque.groups[0].page_bytes == 2 * 4 * 100
    assert opaque.groups[0].page_tokens == 64


def test_from_config_reads_rows_in_bytes() -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8,
        "num_key_value_heads": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    group = CacheGeometry.from_config(config, page_tokens=16, blocks_per_page=2).groups[0]
    assert [(c.name, c.row_bytes, c.layers) for c in group.components] == [("k", 32, (0, 1, 2)), ("v", 32, (0, 1, 2))]


def test_describe_determines_the_bytes_and_not_the_blocks() -> None:
    one = CacheGroup((K,), 8, 1).describe()
    assert one == CacheGroup((K,), 8, 2).describe()
    assert one != CacheGroup((K,), 16, 1).describe()
    assert one != CacheGroup((Component("k", (0, 2), 8),), 8).describe()
    assert one != CacheGroup((Component("k", (0, 1), 9),), 8).describe()


REFUSED: dict[str, Any] = {
    "no name": lambda: Component("", (0,), 8),
    "no layers": lambda: Component("k", (), 8),
    "layer twice": lambda: Component("k", (0, 0), 8),
    "layers not ascending": lambda: Component("k", (1, 0), 8),
    "negative layer": lambda: Component("k", (-1, 0), 8),
    "layer not an int": lambda: Component("k", ("0",), 8),  # type: ignore[arg-type]
    "too many layers": lambda: Component("k", tuple(range(5000)), 8),
    "zero row": lambda: Component("k", (0,), 0),
    "negative row": lambda: Component("k", (0,), -8),
    "bool row": lambda: Component("k", (0,), True),
    "float row": lambda: Component("k", (0,), 8.0),  # type: ignore[arg-type]
    "huge row": lambda: Component("k", (0,), 1 << 40),
    "zero tokens a row": lambda: Component("k", (0,), 8, 0),
    "no components": lambda: CacheGroup((), 8),
    "component twice": lambda: CacheGroup((K, K), 8),
    "zero page": lambda: CacheGroup((K,), 0),
    "negative page": lambda: CacheGroup((K,), -8),
    "huge page_tokens": lambda: CacheGroup((K,), 1 << 30),
    "zero blocks": lambda: CacheGroup((K,), 8, 0),
    "more blocks than tokens": lambda: CacheGroup((K,), 8, 9),
    "blocks that do not divide": lambda: CacheGroup((K,), 8, 3),
    "rows that do not divide": lambda: CacheGroup((Component("block", (0,), 8, 3),), 8),
    "page too large": lambda: CacheGroup((Component("k", tuple(range(64)), 1 << 20),), 1 << 10),
    "no groups": lambda: CacheGeometry(()),
    "unknown component": lambda: CacheGroup((K,), 8).component("v"),
    "negative layer count": lambda: CacheGeometry.attention(-3, k_row_bytes=8, v_row_bytes=8, page_tokens=8),
    "negative v row": lambda: CacheGeometry.attention(1, k_row_bytes=8, v_row_bytes=-8, page_tokens=8),
    "negative scale row": lambda: CacheGeometry.latent(1, row_bytes=8, page_tokens=8, scale_row_bytes=-1),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_page_that_cannot_be_is_refused_with_what_was_given(case: str) -> None:
    with pytest.raises(GeometryError, match=r"; got .*; expected|; valid choices|expected"):
        REFUSED[case]()


@pytest.mark.parametrize("reuse", [window(1024), SNAPSHOT, Reuse("other")])
def test_reuse_rules_that_are_not_served_are_named_and_refused(reuse: Reuse) -> None:
    with pytest.raises(UnsupportedGeometryError, match="reuse rule") as caught:
        CacheGroup((K,), 8, reuse=reuse)
    assert str(reuse) in str(caught.value)
    assert "prefix" in str(caught.value)
