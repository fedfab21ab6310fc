"""The paged pool and the contiguous cache move rows without changing a bit of them or of their neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, Wrap, family_model
from transformers.cache_utils import DynamicLayer

from kvhoist.adapters.transformers.contiguous import ContiguousLayer
from kvhoist.adapters.transformers.pool import PagedPool
from kvhoist.adapters.transformers.shape import probe_shape
from kvhoist.errors import CapacityError, ConfigError


@given(
    family=st.sampled_from(FAMILIES),
    pages=st.lists(st.integers(0, 7), unique=True, min_size=1),
    seed=st.integers(0, 99),
)
def test_what_is_scattered_is_gathered_and_other_pages_are_untouched(family: str, pages: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    pool = PagedPool(probe_shape(family_model(family), page_tokens=4), 8)
    for tensors in pool.tensors.values():
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape))
    before = {name: [t.clone() for t in tensors] for name, tensors in pool.tensors.items()}
    for part in pool.shape.parts:
        rows = torch.randn(part.num_heads, 4 * len(pages), part.head_dim)
        pool.scatter(part, 1, pool.index(pages), rows)
        back = torch.empty_like(rows)
        pool.gather(part, 1, pool.index(pages), back)
        assert torch.equal(back, rows)
    others = [slot for page in range(8) if page not in pages for slot in range(4 * page, 4 * page + 4)]
    for name, tensors in pool.tensors.items():
        assert torch.equal(tensors[0], before[name][0])
        assert torch.equal(tensors[1][others], before[name][1][others])


def test_pool_bytes_are_the_tensors_bytes(any_model: Any, wrap: Wrap) -> None:
    cached = wrap(any_model, device_tokens=103)
    tensors = [t for layers in cached.pool.tensors.values() for t in layers]
    assert cached.pool_bytes == sum(t.numel() * t.element_size() for t in tensors)
    assert cached.pool.num_pages == 103 // 4
    assert "pages of 4 tokens" in str(cached)


def test_device_bytes_bound_the_pool(llama: Any, wrap: Wrap) -> None:
    page_bytes = probe_shape(llama, page_tokens=4).group.page_bytes
    cached = wrap(llama, device_bytes=10 * page_bytes + 1)
    assert cached.pool_bytes == 10 * page_bytes


@pytest.mark.parametrize(
    "sizes", [{"device_tokens": 3}, {"device_tokens": None}, {"device_tokens": 64, "device_bytes": 1 << 20}]
)
def test_a_pool_of_no_or_two_lengths_is_refused(llama: Any, wrap: Wrap, sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        wrap(llama, **sizes)


def test_a_pool_that_does_not_fit_is_refused_before_it_is_made(llama: Any, wrap: Wrap) -> None:
    with pytest.raises(CapacityError, match="device_tokens"):
        wrap(llama, device_tokens=1 << 40)


def test_the_contiguous_layer_equals_the_stock_one_beyond_its_capacity(any_model: Any) -> None:
    shape = probe_shape(any_model, page_tokens=4)
    ours, stock = ContiguousLayer(shape, 2, 64), DynamicLayer()
    for num_tokens in (60, 1, 1, 5, 200, 1):
        new = [torch.randn(2, part.num_heads, num_tokens, part.head_dim) for part in shape.parts]
        for one, other in zip(ours.update(*new), stock.update(*new), strict=True):
            assert torch.equal(one, other)
    assert ours.get_seq_length() == stock.get_seq_length() == 268
