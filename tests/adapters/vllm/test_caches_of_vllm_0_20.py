"""The tensors that vLLM 0.20's own model runner makes for its attention backends: moved as the backends' axes say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_cache_views import index_of, move_in, move_out

from kvhoist.adapters.vllm.caches import RegisteredCaches, read_kv_caches
from kvhoist.errors import LayoutError
from kvhoist.layout import HostOrder

backend_base = pytest.importorskip("vllm.v1.attention.backend")
if "get_kv_cache_block_dim" not in vars(backend_base.AttentionBackend):
    pytest.skip("for vLLM 0.20, whose backends shape their caches themselves", allow_module_level=True)

interface = pytest.importorskip("vllm.v1.kv_cache_interface")
runner = pytest.importorskip("vllm.v1.worker.gpu_model_runner").GPUModelRunner
utils = pytest.importorskip("vllm.v1.attention.backends.utils")

BLOCKS, TOKENS = 6, 64
LAYERS = tuple(f"model.layers.{i}.self_attn.attn" for i in range(3))


def backend(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(pytest.importorskip(f"vllm.{module}"), name)


ATTENTION = {
    "FlashAttention": "v1.attention.backends.flash_attn.FlashAttentionBackend",
    "Triton": "v1.attention.backends.triton_attn.TritonAttentionBackend",
    "FlexAttention": "v1.attention.backends.flex_attention.FlexAttentionBackend",
    "CPU": "v1.attention.backends.cpu_attn.CPUAttentionBackend",
    "ROCm": "v1.attention.backends.rocm_attn.RocmAttentionBackend",
    "ROCm AITER": "v1.attention.backends.rocm_aiter_fa.AiterFlashAttentionBackend",
    "ROCm AITER unified": "v1.attention.backends.rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend",
    "Tree": "v1.attention.backends.tree_attn.TreeAttentionBackend",
}
PLANES = ATTENTION.keys() - {"Triton"}
MLA = "v1.attention.backends.mla.triton_mla.TritonMLABackend"
SPARSE = "v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
INDEXER = "v1.attention.backends.mla.indexer.DeepseekV32IndexerBackend"


@pytest.fixture(params=["NHD", "HND"])
def kv_cache_layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(utils, "_KV_CACHE_LAYOUT_OVERRIDE", request.param)
    utils.get_kv_cache_layout.cache_clear()
    yield request.param
    utils.get_kv_cache_layout.cache_clear()


def attention(**fields: Any) -> Any:
    return interface.FullAttentionSpec(
        **{"block_size": TOKENS, "num_kv_heads": 3, "head_size": 64, "dtype": torch.bfloat16} | fields
    )


def latent(**fields: Any) -> Any:
    return interface.MLAAttentionSpec(
        **{"block_size": TOKENS, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16} | fields
    )


class Worker:
    """As much of the model runner as shapes its caches: one attention group for each (backend, spec, layers)."""

    def __init__(self, *groups: tuple[Any, Any, tuple[str, ...]], cache_dtype: str = "auto") -> None:
        self.groups = [
            SimpleNamespace(backend=backend, kv_cache_spec=spec, layer_names=layers, kv_cache_group_id=0)
            for backend, spec, layers in groups
        ]
        self.runner_only_attn_layers: set[str] = set()
        self.cache_config = SimpleNamespace(cache_dtype=cache_dtype)

    def _kv_cache_spec_attn_group_iterator(self) -> list[Any]:
        return self.groups

    def allocate(self, kernel_tokens: int = TOKENS) -> dict[str, torch.Tensor]:
        raw = {
            name: torch.zeros(group.kv_cache_spec.page_size_bytes * BLOCKS, dtype=torch.int8)
            for group in self.groups
            for name in group.layer_names
        }
        tensors: dict[str, torch.Tensor] = runner._reshape_kv_cache_tensors(self, raw, [kernel_tokens])
        return tensors

    def allocate_uniform(self, kernel_tokens: int = TOKENS) -> dict[str, torch.Tensor]:
        """As for a connector that prefers one tensor for all layers."""
        group = self.groups[0]
        size = group.kv_cache_spec.page_size_bytes * BLOCKS
        config = SimpleNamespace(
            kv_cache_tensors=[SimpleNamespace(size=size, shared_by=[name]) for name in group.layer_names]
        )
        tensors, _, _ = runner.allocate_uniform_kv_caches(
            config, [[group]], self.cache_config.cache_dtype, torch.device("cpu"), [kernel_tokens]
        )
        return dict(tensors)

    def block_dim(self, name: str, tensor: torch.Tensor) -> int:
        group = next(group for group in self.groups if name in group.layer_names)
        spec = group.kv_cache_spec
        found: int = group.backend.get_kv_cache_block_dim(
            spec.block_size, spec.num_kv_heads, spec.head_size, cache_dtype_str=self.cache_config.cache_dtype
        )
        return found

    def check(self, tensors: Mapping[str, torch.Tensor]) -> RegisteredCaches:
        """Assert that blocks moved out and in again are what the tensors' block axes say, and no byte more."""
        raws = list({t.untyped_storage().data_ptr(): bytes_of(t) for t in tensors.values()}.values())
        for seed, raw in enumerate(raws):
            raw.copy_(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, len(raw), dtype=np.uint8)))
        caches = read_kv_caches(
            tensors, list(tensors), index_of, num_blocks=BLOCKS, block_tokens=TOKENS, blocks_per_page=2,
            block_dim=self.block_dim, backend_of=lambda name: "BACKEND",
        )  # fmt: skip
        before = [raw.clone() for raw in raws]
        out, into = [4, 0, 5, 2], [1, 5, 3, 0]
        host, array = move_out(caches, out, HostOrder.PAGE_FIRST_DIRECT)
        assert all(map(torch.equal, raws, before))
        for name, tensor in tensors.items():
            dim = self.block_dim(name, tensor)
            whole = tensor.view(torch.uint8).unflatten(dim, (BLOCKS, -1)).movedim(dim, 0)
            whole[into] = whole[out].clone()
        expected = [raw.clone() for raw in raws]
        for raw, source in zip(raws, before, strict=True):
            raw.copy_(source)
        move_in(caches, host, array, into)
        assert all(map(torch.equal, raws, expected))
        assert not any(map(torch.equal, raws, before))
        return caches


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def named(caches: RegisteredCaches) -> list[str]:
    return [component.name for component in caches.group.components]


@pytest.mark.parametrize("kernel_tokens", [64, 32, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.usefixtures("kv_cache_layout")
def test_attention_of_every_backend(name: str, dtype: torch.dtype, kernel_tokens: int) -> None:
    worker = Worker((backend(ATTENTION[name]), attention(dtype=dtype), LAYERS))
    caches = worker.check(worker.allocate(kernel_tokens))
    assert named(caches) == (["k", "v"] if name in PLANES else ["block"])
    assert sum(c.row_bytes for c in caches.group.components) == attention(dtype=dtype).page_size_bytes


@pytest.mark.parametrize("kernel_tokens", [64, 16])
@pytest.mark.parametrize("name", ["FlashAttention", "Triton"])
@pytest.mark.usefixtures("kv_cache_layout")
def test_one_tensor_for_all_layers(name: str, kernel_tokens: int) -> None:
    worker = Worker((backend(ATTENTION[name]), attention(), LAYERS))
    caches = worker.check(worker.allocate_uniform(kernel_tokens))
    assert named(caches) == ["block"]
    assert len(caches.device.buffers) == 1


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.usefixtures("kv_cache_layout")
def test_attention_beside_state_layers(name: str) -> None:
    """The runner then strides K and V of a block to lie together."""
    worker = Worker((backend(ATTENTION[name]), attention(), LAYERS))
    tensors = worker.allocate()
    runner._update_hybrid_attention_mamba_layout(worker, tensors, [TOKENS])
    assert named(worker.check(tensors)) == ["block"]


@pytest.mark.parametrize(
    ("path", "spec", "cache_dtype"),
    [
        (MLA, latent(), "auto"),
        (MLA, latent(page_size_padded=TOKENS * 576 * 2 + 1024), "auto"),
        (SPARSE, latent(dtype=torch.uint8, cache_dtype_str="fp8_ds_mla"), "fp8_ds_mla"),
    ],
    ids=["bf16", "padded", "fp8_ds_mla"],
)
def test_mla(path: str, spec: Any, cache_dtype: str) -> None:
    worker = Worker((backend(path), spec, LAYERS), cache_dtype=cache_dtype)
    caches = worker.check(worker.allocate())
    assert named(caches) == ["block"]
    assert caches.group.components[0].row_bytes == spec.real_page_size_bytes


def test_mla_and_its_indexer() -> None:
    indexers = tuple(name.replace("attn.attn", "attn.indexer.k_cache") for name in LAYERS)
    worker = Worker(
        (backend(SPARSE), latent(dtype=torch.uint8, cache_dtype_str="fp8_ds_mla"), LAYERS),
        (backend(INDEXER), latent(head_size=132, dtype=torch.uint8), indexers),
        cache_dtype="fp8_ds_mla",
    )
    caches = worker.check(worker.allocate())
    assert [(c.name, c.row_bytes) for c in caches.group.components] == [
        ("block", TOKENS * 656),
        ("block.indexer.k_cache", TOKENS * 132),
    ]


@pytest.mark.usefixtures("kv_cache_layout")
def test_k_and_v_of_two_widths() -> None:
    two_widths = backend("v1.attention.backends.flash_attn_diffkv.FlashAttentionDiffKVBackend")
    worker = Worker((two_widths, attention(head_size_v=two_widths.head_size_v), LAYERS))
    assert named(worker.check(worker.allocate())) == ["block"]


def test_turboquant() -> None:
    turboquant = backend("v1.attention.backends.turboquant_attn.TurboQuantAttentionBackend")
    kind = "turboquant_4bit_nc"
    slot_bytes = turboquant.get_kv_cache_shape(1, TOKENS, 3, 64, kind)[-1]
    spec = interface.TQFullAttentionSpec(
        block_size=TOKENS, num_kv_heads=3, head_size=64, dtype=torch.uint8, tq_slot_size=slot_bytes
    )
    worker = Worker((turboquant, spec, LAYERS), cache_dtype=kind)
    assert named(worker.check(worker.allocate())) == ["block"]


def test_padded_pages_of_planes_overlap_in_this_release_and_are_refused() -> None:
    """The runner then takes the first axis for the blocks', which here counts K and V."""
    raw_bytes = attention().page_size_bytes
    spec = attention(page_size_padded=raw_bytes + 1024)
    worker = Worker((backend(ATTENTION["FlexAttention"]), spec, LAYERS))
    with pytest.raises(LayoutError, match="cannot hold their layers"):
        worker.check(worker.allocate())
