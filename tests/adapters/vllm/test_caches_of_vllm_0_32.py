"""The tensors that vLLM 0.32 itself plans and allocates, for every KVCacheLayout: moved as its own views see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_cache_views import index_of, move_in, move_out

from kvhoist.adapters.vllm.caches import RegisteredCaches, read_kv_caches
from kvhoist.layout import HostOrder

pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM before 0.32 has no KVCacheLayout")
interface = pytest.importorskip("vllm.v1.kv_cache_interface")
planning = pytest.importorskip("vllm.v1.core.kv_cache_utils")
worker = pytest.importorskip("vllm.v1.worker.utils")
rocm = pytest.importorskip("vllm.v1.attention.backends.rocm_attn").RocmAttentionBackend
triton = pytest.importorskip("vllm.v1.attention.backends.triton_attn").TritonAttentionBackend
turboquant = pytest.importorskip("vllm.v1.attention.backends.turboquant_attn").TurboQuantAttentionBackend

BLOCKS, TOKENS = 6, 32
ATTENTION = tuple(f"model.layers.{i}.self_attn.attn" for i in range(3))
INDEXER = tuple(f"model.layers.{i}.self_attn.indexer.k_cache" for i in range(3))
Layout = interface.KVCacheLayout


def attention(**fields: Any) -> Any:
    return interface.FullAttentionSpec(
        **{"block_size": TOKENS, "num_kv_heads": 3, "head_size": 64, "dtype": torch.bfloat16} | fields
    )


def latent(**fields: Any) -> Any:
    return interface.MLAAttentionSpec(
        **{"block_size": TOKENS, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16} | fields
    )


def of_mode(backend: Any, mode: str, dtype: torch.dtype) -> Callable[[], Any]:
    return lambda: backend.customize_spec(attention(kv_quant_mode=interface.KVQuantMode[mode], dtype=dtype))


SPECS: dict[str, Callable[[], Any]] = {
    "attention bf16": attention,
    "attention fp8": lambda: attention(dtype=torch.float8_e4m3fn),
    "attention, K and V of two widths": lambda: attention(head_size_v=32),
    "attention, one head": lambda: attention(num_kv_heads=1),
    "attention, padded pages": lambda: attention(page_size_padded=TOKENS * 3 * 128 * 2 + 512),
    "int8 per token and head": of_mode(triton, "INT8_PER_TOKEN_HEAD", torch.int8),
    "turboquant": of_mode(turboquant, "TURBOQUANT_4BIT_NC", torch.uint8),
    "ROCm, K and V as two slots": lambda: rocm.customize_spec(attention()),
    "MLA": latent,
    "MLA fp8_ds_mla": lambda: latent(dtype=torch.uint8, state_content_bytes=656, cache_dtype_str="fp8_ds_mla"),
    "MLA, compressed and aligned": lambda: latent(
        dtype=torch.uint8, state_content_bytes=584, tokens_per_state=4, alignment=576
    ),
}


def allocate(
    layers: Mapping[str, Any], layout: Any, kernel_tokens: int | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what the worker registers, planned and allocated by vLLM, and the bytes beneath."""
    specs = list(layers.values())
    uniform = interface.UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=dict(layers))
    group = interface.KVCacheGroupSpec(list(layers), specs[0] if len(set(specs)) == 1 else uniform)
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
        ),
    )
    planned = planning.get_kv_cache_config_from_groups(config, [group], 1 << 30)
    assert planned.num_blocks == BLOCKS
    tensors = worker.allocate_kv_cache(
        planned, torch.device("cpu"), layout, None if kernel_tokens is None else [kernel_tokens]
    )
    return tensors, bytes_of(next(iter(tensors.values())))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def read(tensors: Mapping[str, torch.Tensor]) -> RegisteredCaches:
    return read_kv_caches(
        tensors,
        list(tensors),
        index_of,
        num_blocks=BLOCKS,
        block_tokens=TOKENS,
        blocks_per_page=2,
        block_dim=lambda name, tensor: 0,
        backend_of=lambda name: "BACKEND",
    )


def check(tensors: Mapping[str, torch.Tensor], raw: torch.Tensor) -> RegisteredCaches:
    """Assert that blocks moved out and in again are what vLLM's own views of whole blocks say, and no byte more."""
    raw.copy_(torch.from_numpy(np.random.default_rng(1).integers(0, 256, len(raw), dtype=np.uint8)))
    caches = read(tensors)
    before = raw.clone()
    out, into = [4, 0, 5, 2], [1, 5, 3, 0]
    host, array = move_out(caches, out, HostOrder.PAGE_FIRST_DIRECT)
    assert torch.equal(raw, before)
    whole = {name: interface.group_kernel_blocks(tensor.view(torch.uint8), BLOCKS) for name, tensor in tensors.items()}
    moved = {name: view[out].clone() for name, view in whole.items()}
    for name, view in whole.items():
        view[into] = moved[name]
    expected = raw.clone()
    raw.copy_(before)
    move_in(caches, host, array, into)
    assert torch.equal(raw, expected)
    assert not torch.equal(raw, before)
    return caches


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", SPECS)
def test_every_layout_of_every_kind_of_page(name: str, layout: Any) -> None:
    spec = SPECS[name]()
    if spec.page_size_padded is not None and spec.num_heads > 1 and not layout.is_block_compact:
        with pytest.raises(AssertionError):  # vLLM pads only whole pages
            allocate(dict.fromkeys(ATTENTION, spec), layout)
        return
    tensors, raw = allocate(dict.fromkeys(ATTENTION, spec), layout)
    caches = check(tensors, raw)
    assert [(c.name, c.layers) for c in caches.group.components] == [("block", (0, 1, 2))]
    assert caches.group.components[0].row_bytes == spec.unpadded_page_size_bytes


@pytest.mark.parametrize("kernel_tokens", [8, 16])
@pytest.mark.parametrize("layout", [Layout.LBHNC, Layout.LBNHC], ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", ["attention bf16", "ROCm, K and V as two slots", "MLA fp8_ds_mla"])
def test_a_block_of_several_kernel_blocks(name: str, layout: Any, kernel_tokens: int) -> None:
    spec = SPECS[name]()
    tensors, raw = allocate(dict.fromkeys(ATTENTION, spec), layout, kernel_tokens)
    assert {len(tensor) for tensor in tensors.values()} == {BLOCKS * TOKENS // kernel_tokens}
    caches = check(tensors, raw)
    assert caches.group.components[0].row_bytes == spec.page_size_bytes


@pytest.mark.parametrize("layout", [x for x in Layout if x.is_block_compact], ids=lambda layout: layout.name)
def test_mla_and_its_indexer(layout: Any) -> None:
    main = SPECS["MLA fp8_ds_mla"]()
    index = latent(head_size=132, dtype=torch.uint8, cache_role=interface.SparseCacheRole.INDEXER)
    tensors, raw = allocate(dict.fromkeys(ATTENTION, main) | dict.fromkeys(INDEXER, index), layout)
    caches = check(tensors, raw)
    assert [(c.name, c.row_bytes) for c in caches.group.components] == [
        ("block", TOKENS * 656),
        ("block.indexer.k_cache", TOKENS * 132),
    ]
    assert len(caches.device.buffers) == 1


@pytest.mark.parametrize("layout", [x for x in Layout if x.is_block_compact], ids=lambda layout: layout.name)
def test_a_target_and_a_draft_model_of_other_heads(layout: Any) -> None:
    draft = "model.layers.3.self_attn.attn"
    tensors, raw = allocate(dict.fromkeys(ATTENTION, attention()) | {draft: attention(num_kv_heads=1)}, layout)
    caches = check(tensors, raw)
    assert [(c.name, c.layers) for c in caches.group.components] == [("block", (0, 1, 2)), ("block.2", (3,))]


def test_the_bytes_of_a_block_are_one_run_where_vllm_packs_all_layers_of_a_block() -> None:
    """What BLHNC is for: then a page of any number of layers is moved in as many runs as it has blocks."""
    tensors, raw = allocate(dict.fromkeys(ATTENTION, attention()), Layout.BLHNC)
    placed = check(tensors, raw).device.layout.components[0]
    assert placed.layer_pitch_bytes == placed.part_bytes == placed.unit_stride_bytes // 3
