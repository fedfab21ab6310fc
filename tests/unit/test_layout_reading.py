"""Layouts read off torch and numpy tensors: the bytes found by the formula are those found by indexing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.reference import copy
from kvhoist.device_layout import DeviceCache, read_device_layout
from kvhoist.device_layout.axes import Axes
from kvhoist.errors import GeometryError, LayoutError
from kvhoist.geometry import CacheGeometry, CacheGroup
from kvhoist.layout import host_layout
from kvhoist.platform.base import CPU, regions_of
from kvhoist.platform.cpu import host_view

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 3, 5, 4, 2, 8
MHA = CacheGeometry.attention(
    LAYERS, k_row_bytes=HEADS * DIM * 2, v_row_bytes=HEADS * DIM * 2, page_tokens=8, blocks_per_page=2
).groups[0]
MLA = CacheGeometry.latent(LAYERS, row_bytes=DIM * 2, page_tokens=8, blocks_per_page=2).groups[0]
OPAQUE = CacheGeometry.opaque(LAYERS, block_bytes=96, block_tokens=4, blocks_per_page=2).groups[0]


def from_torch(*shape: int) -> Any:
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16).view(torch.bfloat16)


def from_numpy(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).integers(0, 1 << 16, shape, dtype=np.uint16)


def bytes_of(tensor: Any) -> bytes:
    if isinstance(tensor, torch.Tensor):
        return tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(tensor).tobytes()


def bytes_by_layout(cache: DeviceCache, index: int, layer: int, block: int, row: int) -> bytes:
    """One row by the formula of ComponentLayout, part after part."""
    placed = cache.layout.components[index]
    place = placed.places[layer]
    memory = host_view(cache.buffers[place.buffer])
    start = place.offset_bytes + block * placed.unit_stride_bytes + row * placed.row_stride_bytes
    starts = [start + part * placed.part_stride_bytes for part in range(placed.num_parts)]
    return b"".join(memory[at : at + placed.part_bytes].tobytes() for at in starts)


Make = Callable[..., Any]
Row = Callable[[Any, int, int, int, int], Any]


def each(make: Make, *shape: int) -> list[Any]:
    return [make(*shape) for _ in range(LAYERS)]


# (axes, group, tensors, the row of (tensors, component, layer, block, token))
KINDS: dict[str, tuple[str, CacheGroup, Callable[[Make], Any], Row]] = {
    "layer-first slots": (
        "slot head dim",
        MHA,
        lambda make: {c: each(make, BLOCKS * TOKENS + 2, HEADS, DIM) for c in ("k", "v")},
        lambda t, c, layer, b, r: t["kv"[c]][layer][b * TOKENS + r],
    ),
    "vLLM, K and V outermost": (
        "kv block token head dim",
        MHA,
        lambda make: each(make, 2, BLOCKS, TOKENS, HEADS, DIM),
        lambda t, c, layer, b, r: t[layer][c, b, r],
    ),
    "K and V interleaved by block": (
        "block kv token head dim",
        MHA,
        lambda make: each(make, BLOCKS, 2, TOKENS, HEADS, DIM),
        lambda t, c, layer, b, r: t[layer][b, c, r],
    ),
    "head-major": (
        "block head token dim",
        MHA,
        lambda make: {c: each(make, BLOCKS, HEADS, TOKENS, DIM) for c in ("k", "v")},
        lambda t, c, layer, b, r: t["kv"[c]][layer][b, :, r],
    ),
    "K and V in the last dimension": (
        "block head token (kv dim)",
        MHA,
        lambda make: each(make, BLOCKS, HEADS, TOKENS, 2 * DIM),
        lambda t, c, layer, b, r: t[layer][b, :, r, c * DIM : (c + 1) * DIM],
    ),
    "packed keys, dim before token": (
        "block head dim token pack",
        MHA,
        lambda make: {c: each(make, BLOCKS, HEADS, DIM // 4, TOKENS, 4) for c in ("k", "v")},
        lambda t, c, layer, b, r: t["kv"[c]][layer][b, :, :, r],
    ),
    "all layers in one tensor": (
        "layer kv block token head dim",
        MHA,
        lambda make: make(LAYERS, 2, BLOCKS, TOKENS, HEADS, DIM),
        lambda t, c, layer, b, r: t[layer, c, b, r],
    ),
    "layers inside the block": (
        "block layer kv token head dim",
        MHA,
        lambda make: make(BLOCKS, LAYERS, 2, TOKENS, HEADS, DIM),
        lambda t, c, layer, b, r: t[b, layer, c, r],
    ),
    "transposed views": (
        "block token head dim",
        MHA,
        lambda make: {c: [t.swapaxes(1, 2) for t in each(make, BLOCKS, HEADS, TOKENS, DIM)] for c in ("k", "v")},
        lambda t, c, layer, b, r: t["kv"[c]][layer][b, r],
    ),
    "sliced views of one storage": (
        "slot head dim",
        MHA,
        lambda make: (lambda whole: {c: [whole[i, :, j] for i in range(LAYERS)] for j, c in enumerate("kv")})(
            make(LAYERS, BLOCKS * TOKENS, 2, HEADS, DIM)
        ),
        lambda t, c, layer, b, r: t["kv"[c]][layer][b * TOKENS + r],
    ),
    "MLA slots": (
        "slot dim",
        MLA,
        lambda make: each(make, BLOCKS * TOKENS, DIM),
        lambda t, c, layer, b, r: t[layer][b * TOKENS + r],
    ),
    "MLA blocks": (
        "block token dim",
        MLA,
        lambda make: {"latent": each(make, BLOCKS, TOKENS, DIM)},
        lambda t, c, layer, b, r: t[layer if isinstance(t, list) else "latent"][layer][b, r],
    ),
    "opaque blocks": (
        "block ...",
        OPAQUE,
        lambda make: each(make, BLOCKS, 2, 3, 8),
        lambda t, c, layer, b, r: t[layer][b],
    ),
    "opaque blocks of one tensor": (
        "layer block ...",
        OPAQUE,
        lambda make: make(LAYERS, BLOCKS, 48),
        lambda t, c, layer, b, r: t[layer, b],
    ),
    "opaque blocks that hold all layers": (
        "block layer ...",
        OPAQUE,
        lambda make: make(BLOCKS, LAYERS, 48),
        lambda t, c, layer, b, r: t[b, layer],
    ),
}


@pytest.mark.parametrize("make", [from_torch, from_numpy])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_by_the_layout_are_the_rows_by_indexing(kind: str, make: Make) -> None:
    axes, group, tensors_of, row_of = KINDS[kind]
    tensors = tensors_of(make)
    cache = read_device_layout(group, tensors, axes, name=kind)
    assert cache.num_blocks == BLOCKS
    assert cache.device == CPU
    for c, component in enumerate(group.components):
        for layer in range(LAYERS):
            for block in range(BLOCKS):
                for row in range(group.rows_per_block(component)):
                    expected = bytes_of(row_of(tensors, c, layer, block, row))
                    assert bytes_by_layout(cache, c, layer, block, row) == expected


@pytest.mark.parametrize("make", [from_torch, from_numpy])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_offloaded_and_loaded_into_other_blocks_are_the_same_rows(kind: str, make: Make) -> None:
    axes, group, tensors_of, row_of = KINDS[kind]
    tensors = tensors_of(make)
    cache = read_device_layout(group, tensors, axes)
    host = np.zeros(3 * group.page_pitch_bytes, np.uint8)
    out, back = CopyPlan.make(cache.layout, host_layout(group, 3)), CopyPlan.make(host_layout(group, 3), cache.layout)

    def rows(blocks: list[int]) -> list[bytes]:
        return [
            bytes_of(row_of(tensors, c, layer, block, row))
            for c, component in enumerate(group.components)
            for layer in range(LAYERS)
            for block in blocks
            for row in range(group.rows_per_block(component))
        ]

    first, untouched = rows([4, 1]), rows([4, 1, 2])
    copy(out, cache.buffers, [4, 1], regions_of([host]), [2])
    copy(back, regions_of([host]), [2], cache.buffers, [0, 3])
    assert rows([0, 3]) == first
    assert rows([4, 1, 2]) == untouched


def test_views_of_one_storage_are_one_buffer() -> None:
    whole = from_torch(LAYERS, 2, BLOCKS, TOKENS, HEADS, DIM)
    cache = read_device_layout(MHA, list(whole), "kv block token head dim")
    assert len(cache.buffers) == 1
    assert cache.buffers[0].num_bytes == whole.numel() * 2


def test_axes_may_differ_by_component() -> None:
    group = CacheGeometry.attention(2, k_row_bytes=32, v_row_bytes=32, page_tokens=4, scale_row_bytes=8).groups[0]
    tensors = {
        "k v": [from_torch(2, BLOCKS, 4, HEADS, DIM) for _ in range(2)],
        "k_scale": [torch.rand(BLOCKS, HEADS, 4) for _ in range(2)],
        "v_scale": torch.rand(2, BLOCKS * 4, HEADS),
    }
    axes = {"k v": "kv block token head dim", "k_scale": "block head token", "v_scale": "layer slot head"}
    cache = read_device_layout(group, tensors, axes)
    scale = tensors["k_scale"][1][3, :, 2]
    assert bytes_by_layout(cache, 2, 1, 3, 2) == bytes_of(scale)
    assert bytes_by_layout(cache, 3, 1, 3, 2) == bytes_of(tensors["v_scale"][1, 3 * 4 + 2])


def test_regions_keep_the_tensors_alive() -> None:
    cache = read_device_layout(
        MLA, [torch.full((BLOCKS * TOKENS, DIM), 3, dtype=torch.int16) for _ in range(3)], "slot dim"
    )
    assert bytes_by_layout(cache, 0, 2, 4, 1) == bytes_of(torch.full((DIM,), 3, dtype=torch.int16))


def slots(num: int = BLOCKS * TOKENS, heads: int = HEADS, dim: int = DIM, count: int = LAYERS) -> list[Any]:
    return [from_torch(num, heads, dim) for _ in range(count)]


UNREADABLE: dict[str, tuple[Any, str, type[Exception], str]] = {
    "unknown axis": ({"k": slots(), "v": slots()}, "slot heads dim", LayoutError, "'heads'"),
    "axis twice": ({"k": slots(), "v": slots()}, "slot dim dim", LayoutError, "at most once"),
    "no ids": ({"k": slots(), "v": slots()}, "token head dim", LayoutError, "one of them"),
    "slot and token": ({"k": slots(), "v": slots()}, "slot token dim", LayoutError, "'slot' alone"),
    "no row": ({"k": slots(), "v": slots()}, "block token", LayoutError, "no axis of a row"),
    "rest not last": ({"k": slots(), "v": slots()}, "block ... dim", LayoutError, "last"),
    "too few dimensions": ({"k": slots(), "v": slots()}, "block token head dim", LayoutError, "parentheses"),
    "a layer too few": ({"k": slots(count=2), "v": slots()}, "slot head dim", LayoutError, "one a layer"),
    "not a list": ({"k": slots()[0], "v": slots()}, "slot head dim", LayoutError, "'layer' to the axes"),
    "component missing": ({"k": slots()}, "slot head dim", LayoutError, "each component"),
    "component unknown": ({"k": slots(), "w": slots()}, "slot head dim", GeometryError, "'w'"),
    "no kv axis": (slots(), "slot head dim", LayoutError, "kv"),
    "kv axis for one": ({"k": slots(), "v": slots()}, "kv slot dim", LayoutError, "kv"),
    "kv of three": ([from_torch(3, BLOCKS, TOKENS, HEADS, DIM)] * 3, "kv block token head dim", GeometryError, "'kv'"),
    "other block": ([from_torch(2, 9, 5, HEADS, DIM)] * 3, "kv block token head dim", GeometryError, "'token'"),
    "rows of another model": ({"k": slots(dim=4), "v": slots()}, "slot head dim", GeometryError, "16 B a row"),
    "another dtype": (
        {"k": [torch.zeros(BLOCKS * TOKENS, HEADS, DIM) for _ in range(3)], "v": slots()},
        "slot head dim",
        GeometryError,
        "torch.float32",
    ),
    "layers differ": ({"k": slots(), "v": [*slots()[:2], *slots(48)[:1]]}, "slot head dim", LayoutError, "layer 2"),
    "components of other lengths": ({"k": slots(), "v": slots(40)}, "slot head dim", LayoutError, "number of blocks"),
    "dim not contiguous": (
        {"k": [t.swapaxes(1, 2) for t in slots(heads=DIM, dim=HEADS)], "v": slots()},
        "slot head dim",
        LayoutError,
        "not contiguous",
    ),
    "no token axis": ({"k": [t[:, :1] for t in slots()], "v": slots()}, "block head dim", LayoutError, "'token'"),
    "not a tensor": ({"k": ["a", "b", "c"], "v": slots()}, "slot head dim", LayoutError, "str"),
    "an expanded view": (
        {"k": [from_torch(1, HEADS, DIM).expand(BLOCKS * TOKENS, HEADS, DIM) for _ in range(3)], "v": slots()},
        "slot head dim",
        LayoutError,
        "overlap",
    ),
    "an empty tensor": ({"k": slots(0), "v": slots(0)}, "slot head dim", LayoutError, "empty"),
    "a negative stride": (
        {"k": [from_numpy(BLOCKS * TOKENS, HEADS, DIM)[::-1] for _ in range(3)], "v": slots()},
        "slot head dim",
        LayoutError,
        "negative",
    ),
    "less than a block": ({"k": slots(3), "v": slots(3)}, "slot head dim", LayoutError, "at least one unit"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_refused_with_the_reason(case: str) -> None:
    tensors, axes, error, text = UNREADABLE[case]
    with pytest.raises(error) as caught:
        read_device_layout(MHA, tensors, axes)
    assert text in str(caught.value)
    assert "expected" in str(caught.value) or "valid choices" in str(caught.value) or "got" in str(caught.value)


def test_tensors_that_share_bytes_are_refused() -> None:
    k = slots()
    with pytest.raises(LayoutError, match="overlap"):
        read_device_layout(MHA, {"k": k, "v": k}, "slot head dim")
    with pytest.raises(LayoutError, match="overlap"):
        read_device_layout(MHA, {"k": [k[0], k[1], k[0]], "v": slots()}, "slot head dim")
    whole = torch.zeros(BLOCKS * TOKENS + 1, HEADS, DIM, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match="overlap"):
        read_device_layout(
            MHA, {"k": [whole[1:], *slots(count=2)], "v": [whole[:-1], *slots(count=2)]}, "slot head dim"
        )


def test_an_opaque_block_must_be_contiguous_and_of_the_right_length() -> None:
    with pytest.raises(LayoutError, match="not contiguous inside a block"):
        read_device_layout(OPAQUE, [from_torch(BLOCKS, 6, 8).swapaxes(1, 2) for _ in range(3)], "block ...")
    with pytest.raises(GeometryError, match="80 B a row"):
        read_device_layout(OPAQUE, [from_torch(BLOCKS, 40) for _ in range(3)], "block ...")


def test_a_dimension_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(GeometryError, match="cannot be cut"):
        read_device_layout(MHA, [from_torch(BLOCKS, HEADS, TOKENS, 15) for _ in range(3)], "block head token (kv dim)")
    assert Axes.parse("block head token (kv dim)").names == ("block", "head", "token", "kv", "dim")


def test_tensors_on_several_devices_are_refused() -> None:
    class Elsewhere:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, torch.device("cuda", 1)
            self.data_ptr, self.stride, self.element_size = tensor.data_ptr, tensor.stride, tensor.element_size
            self.untyped_storage = tensor.untyped_storage

    with pytest.raises(LayoutError, match="cuda:1"):
        read_device_layout(MHA, {"k": slots(), "v": [Elsewhere(t) for t in slots()]}, "slot head dim")
    cache = read_device_layout(MHA, {c: [Elsewhere(t) for t in slots()] for c in "kv"}, "slot head dim")
    assert str(cache.device) == "cuda:1"
    assert {str(region.device) for region in cache.buffers} == {"cuda:1"}
