"""The attention over a cached prefix, judged by plain attention with a mask."""

from __future__ import annotations

import torch

from kvhoist.adapters.transformers.attention import attend


def assert_attends_as_a_mask_says(
    num_new: int, num_cached: int, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    total = num_cached + num_new
    query, key, value = (
        torch.randn(1, heads, length, 64, device=device, dtype=dtype)
        for heads, length in ((8, num_new), (2, total), (2, total))
    )
    module = torch.nn.Module()
    module.num_key_value_groups = 4  # type: ignore[assignment]
    ours, _ = attend(module, query, key, value, None, scaling=0.125)
    mask = torch.ones(num_new, total, dtype=torch.bool, device=device).tril(num_cached)
    repeated = (tensor.float().repeat_interleave(4, dim=1) for tensor in (key, value))
    plain = torch.nn.functional.scaled_dot_product_attention(query.float(), *repeated, attn_mask=mask, scale=0.125)
    torch.testing.assert_close(ours.float(), plain.transpose(1, 2), rtol=tolerance, atol=tolerance)
