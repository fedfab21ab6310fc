"""Every layout of vLLM's attention backends, byte for byte, out to the host and back into other blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from vllm_cache_views import Memory, Spec, check_round_trip, host_page, move_out, read

from kvhoist.layout import HostOrder

LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn", "model.layers.2.self_attn.attn")
INDEXERS = tuple(f"model.layers.{i}.self_attn.indexer.k_cache" for i in range(3))
PACKED = "0.32 DSA, packed"
BLOCKS = 7
TOKENS = 4

KV_FIRST = {"kv": 2, "block": BLOCKS, "token": TOKENS, "head": 3, "dim": 8}
KV_FIRST_HND = {"kv": 2, "block": BLOCKS, "head": 3, "token": TOKENS, "dim": 8}
BLOCK_FIRST = {"block": BLOCKS, "kv": 2, "token": TOKENS, "head": 3, "dim": 8}
LATENT = {"block": BLOCKS, "token": TOKENS, "latent": 36}
PAGES = {"block": BLOCKS, "head": 3, "token": TOKENS, "content": 16}
SLOTS = {"block": BLOCKS, "head": 2, "token": TOKENS, "content": 24}


def one(axes: dict[str, int], order: str, **fields: Any) -> tuple[Spec, ...]:
    return (Spec(axes, order, layers=LAYERS, **fields),)


def dsa(order: str, *, packed: bool) -> tuple[Spec, ...]:
    """MLA and its indexer; packed: all pages of a block beside each other, and a gap after them."""
    latent, index = TOKENS * 36 * 2, TOKENS * 12
    whole = 3 * (latent + index) + 16
    gaps = ({"block": whole - 3 * latent}, {"block": whole - 3 * index}) if packed else ({}, {})
    index_axes = {"block": BLOCKS, "token": TOKENS, "latent": 12}
    return (
        Spec(LATENT, order, layers=LAYERS, gaps=gaps[0]),
        Spec(index_axes, order, dtype="uint8", layers=INDEXERS, gaps=gaps[1], offset_bytes=3 * latent * packed),
    )


# The names say release, backend or layout. Where the numbers of a model do not matter they are small.
LAYOUTS: dict[str, tuple[Spec, ...]] = {
    "0.20 FlashAttention NHD": one(KV_FIRST, "layer kv block token head dim"),
    "0.20 FlashAttention HND": one(KV_FIRST, "layer kv block head token dim", dtype="float16"),
    "0.20 FlashAttention fp8": one(KV_FIRST, "layer kv block token head dim", dtype="float8_e4m3fn"),
    "0.20 FlashAttention, 2 kernel blocks": one(KV_FIRST, "layer kv block token head dim", ratio=2),
    "0.20 FlashAttention beside state layers": one(KV_FIRST, "layer block kv token head dim"),
    "0.20 FlashAttention NHD, one tensor for all layers": one(KV_FIRST, "block layer kv token head dim"),
    "0.20 FlashAttention HND, one tensor for all layers": one(KV_FIRST, "block head layer kv token dim"),
    "0.20 the same, 2 kernel blocks": one(KV_FIRST, "block head layer kv token dim", ratio=2),
    "0.20 ROCm fp8": one(KV_FIRST, "layer kv block token head dim", dtype="float8_e4m3fnuz"),
    "0.20 CPU": one(KV_FIRST_HND, "layer kv block head token dim"),
    "0.20 FlashInfer NHD": one(BLOCK_FIRST, "layer block kv token head dim"),
    "0.20 FlashInfer HND": one(BLOCK_FIRST, "layer block kv head token dim"),
    "0.20 FlashInfer HND, one tensor for all layers": one(BLOCK_FIRST, "block kv head layer token dim"),
    "0.20 FlashInfer nvfp4": one(BLOCK_FIRST | {"dim": 9}, "layer block kv head token dim", dtype="uint8"),
    "0.20 Triton int8 per token and head": one(
        BLOCK_FIRST | {"dim": 12}, "layer block kv token head dim", dtype="int8"
    ),
    "0.20 Triton, 4 kernel blocks": one(BLOCK_FIRST, "layer block kv token head dim", ratio=4),
    "0.20 K and V of two widths": one(
        {"block": BLOCKS, "token": TOKENS, "head": 3, "dim": 8 + 5}, "layer block head token dim"
    ),
    "0.20 TurboQuant": one({"block": BLOCKS, "token": TOKENS, "head": 3, "slot": 22}, "layer block token head slot",
                           dtype="uint8"),
    "0.20 MLA": one(LATENT, "layer block token latent"),
    "0.20 MLA fp8_ds_mla": one(LATENT | {"latent": 656}, "layer block token latent", dtype="uint8"),
    "0.20 MLA, padded pages": one(LATENT, "layer block token latent", gaps={"block": 40}),
    "0.20 MLA, 2 kernel blocks": one(LATENT, "layer block token latent", ratio=2),
    "0.20 DSA": dsa("layer block token latent", packed=False),
    "0.32 LBHNC": one(PAGES, "layer block head token content"),
    "0.32 LBNHC": one(PAGES, "layer block token head content", dtype="float8_e5m2"),
    "0.32 LHBNC": one(PAGES, "layer head block token content"),
    "0.32 BLHNC": one(PAGES, "block layer head token content"),
    "0.32 BLNHC": one(PAGES, "block layer token head content", dtype="uint8"),
    "0.32 BHLNC": one(PAGES, "block head layer token content"),
    "0.32 LBHNC, 2 kernel blocks": one(PAGES, "layer block head token content", ratio=2),
    "0.32 LHBNC, 4 kernel blocks": one(PAGES, "layer head block token content", ratio=4),
    "0.32 LBHNC, padded pages": one(PAGES, "layer block head token content", gaps={"block": 64}),
    "0.32 ROCm, K and V as slots around the blocks": one(SLOTS, "layer head block token content"),
    "0.32 ROCm, K and V as slots in a block": one(SLOTS, "layer block head token content"),
    "0.32 float32": one(PAGES, "layer block head token content", dtype="float32"),
    PACKED: dsa("block layer token latent", packed=True),
    "one layer, one head": (
        Spec(PAGES | {"head": 1}, "layer block head token content", layers=("model.layers.5.self_attn.attn",)),
    ),
}  # fmt: skip

PLANES = {name for name, specs in LAYOUTS.items() if specs[0].plane_axis}


def owners_of(name: str) -> dict[str, Sequence[str]]:
    """The layers of each component, as the table above means them."""
    specs = LAYOUTS[name]
    owners: dict[str, Sequence[str]] = dict.fromkeys(("k", "v") if name in PLANES else ("block",), specs[0].layers)
    if len(specs) > 1:
        owners["block.indexer.k_cache"] = specs[1].layers
    return owners


def memory_of(name: str, seed: int) -> Memory:
    return Memory(LAYOUTS[name], seed, shared=name == PACKED)


def test_the_table_has_planes_where_vllm_has_them() -> None:
    assert {
        "0.20 FlashAttention NHD", "0.20 FlashAttention HND", "0.20 FlashAttention fp8", "0.20 ROCm fp8", "0.20 CPU",
        "0.20 FlashAttention, 2 kernel blocks",
    } == PLANES  # fmt: skip


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_components_layers_and_bytes(name: str, library: str) -> None:
    memory, owners = memory_of(name, 1), owners_of(name)
    tokens = TOKENS * memory.specs[0].ratio
    caches = read(memory, memory.tensors() if library == "torch" else memory.views(), block_tokens=tokens)
    assert [component.name for component in caches.group.components] == list(owners)
    for component in caches.group.components:
        spec = memory.spec_of(owners[component.name][0])
        assert component.layers == tuple(range(3)) or name == "one layer, one head"
        assert component.tokens_per_row == tokens
        assert component.row_bytes == spec.block_bytes // (2 if spec.plane_axis else 1)
    assert caches.device.num_blocks == BLOCKS
    assert caches.layer_of == {layer: int(layer.split(".")[2]) for spec in memory.specs for layer in spec.layers}


@pytest.mark.parametrize("blocks_per_page", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_host_page_holds_whole_blocks_in_the_order_of_the_device(name: str, blocks_per_page: int) -> None:
    memory = memory_of(name, 2)
    caches = read(memory, block_tokens=TOKENS * memory.specs[0].ratio, blocks_per_page=blocks_per_page)
    blocks = [5, 0, 6, 3]
    host, array = move_out(caches, blocks, HostOrder.PAGE_FIRST_DIRECT)
    pitch, num_bytes = caches.group.page_pitch_bytes, caches.group.page_bytes
    for page in range(host.num_units):
        expected = host_page(
            memory, caches, owners_of(name), blocks[page * blocks_per_page : (page + 1) * blocks_per_page]
        )
        assert array[page * pitch : page * pitch + num_bytes].tobytes() == expected


@pytest.mark.parametrize("order", list(HostOrder))
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_come_back_in_other_blocks_and_nothing_else_changes(name: str, order: HostOrder) -> None:
    memory = memory_of(name, 3)
    caches = read(memory, block_tokens=TOKENS * memory.specs[0].ratio, blocks_per_page=2)
    layers = [layer for spec in memory.specs for layer in spec.layers]
    check_round_trip(memory, caches, [5, 0, 6, 3], [1, 6, 2, 0], layers, order)


@pytest.mark.parametrize("name", sorted(LAYOUTS.keys() - {PACKED}))
def test_the_order_of_a_block_does_not_depend_on_the_number_of_blocks_or_layers(name: str) -> None:
    few = memory_of(name, 1)
    tokens = TOKENS * few.specs[0].ratio
    more = [
        Spec(
            dict(spec.axes) | {"block": BLOCKS + 4}, spec.order, spec.dtype,
            tuple(spec.layers) + tuple(layer.replace(".0.", ".9.") for layer in spec.layers[:1]),
            spec.ratio, spec.gaps, spec.offset_bytes,
        )
        for spec in few.specs
    ]  # fmt: skip
    assert read(few, block_tokens=tokens).block_order == read(Memory(more, 1), block_tokens=tokens).block_order


def test_layouts_that_differ_only_outside_of_the_block_share_pages() -> None:
    """Heads outside of the blocks, layers between them: on the host a block is the same, and so is its name."""
    orders = {read(memory_of(f"0.32 {n}", 1), block_tokens=TOKENS).block_order for n in ("LBHNC", "LHBNC", "BHLNC")}
    assert orders == {"block: BACKEND bfloat16 b1x3x4x16/0,64,16,1"}


def test_the_order_says_backend_dtype_shape_and_strides_of_each_kind() -> None:
    caches = read(memory_of("0.20 DSA", 1), block_tokens=TOKENS)
    assert caches.block_order.split("; ") == [
        "block: BACKEND bfloat16 b1x4x36/0,36,1",
        "block.indexer.k_cache: BACKEND uint8 b1x4x12/0,12,1",
    ]
    caches = read(memory_of("0.20 FlashAttention HND", 1), block_tokens=TOKENS)
    assert caches.block_order == "k v: BACKEND float16 2xb1x4x3x8/plane,0,8,32,1"


def test_a_block_of_other_order_dtype_backend_or_kernel_blocks_has_another_name() -> None:
    specs = [
        *one(PAGES, "layer block head token content"),
        *one(PAGES, "layer block token head content"),
        *one(PAGES, "layer block head token content", dtype="float16"),
        *one(PAGES, "layer block head token content", backend="OTHER"),
        *one(PAGES | {"token": 2}, "layer block head token content", ratio=2),
        *one(PAGES | {"head": 4, "token": 3}, "layer block head token content"),
    ]
    orders = {read(Memory([spec], 1), block_tokens=12).block_order for spec in specs}
    assert len(orders) == len(specs)
