"""Attention of new tokens that follow a cached prefix, without a mask: then flash attention can serve it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

PREFIX_ATTENTION = "kvhoist_sdpa"
"""Name of the attention implementation, as `attn_implementation` takes it."""


def register_attention() -> None:
    """Let models of transformers have it by its name. Idempotent."""
    AttentionInterface.register(PREFIX_ATTENTION, attend)
    AttentionMaskInterface.register(PREFIX_ATTENTION, mask)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' `sdpa`, but several new tokens after a prefix that come without a mask see what precedes them:
    the causal triangle ends at the last token. Tensors are `[batch, heads, tokens, head_dim]`."""
    causal = options.get("is_causal") is not False and getattr(module, "is_causal", True)
    if attention_mask is not None or query.shape[2] in (1, key.shape[2]) or not causal:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return plain
    bias = causal_lower_right(query.shape[2], key.shape[2])
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


def mask(**asked: Any) -> torch.Tensor | None:
    """The mask of transformers' `sdpa`; none where new tokens follow the prefix, all see all that precedes them, and
    nothing is padded: `attend` knows that case. Windows, packed sequences and padded batches keep their masks."""
    length, total, before = (asked.get(name) for name in ("q_length", "kv_length", "q_offset"))
    plain = (
        asked.get("mask_function", causal_mask_function) is causal_mask_function
        and asked.get("attention_mask") is None
        and asked.get("local_size") is None
        and asked.get("allow_is_causal_skip", True)
        and not asked.get("kv_offset", 0)
    )
    if plain and isinstance(length, int) and isinstance(before, int) and before + length == total:
        return None
    stock: torch.Tensor | None = sdpa_mask(**asked)
    return stock
