"""Tiny models of real transformers classes, with weights so large that logits provably depend on the KV."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

from kvhoist.adapters.transformers import CachedModel, Sampling  # noqa: E402
from kvhoist.demo.oracles import Recorder, Trace  # noqa: E402

VOCABULARY = 211
PAGE_TOKENS = 4

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 16}),
    "deepseek_v2": ("DeepseekV2Config", _MLA),
    "deepseek_v3": ("DeepseekV3Config", _MLA),
}
FAMILIES = tuple(_CONFIGS)
_CONFIGS["gpt2"] = ("GPT2Config", {})  # learned positions; not in every test


def tiny_config(family: str, **changes: Any) -> Any:
    name, fields = _CONFIGS[family]
    return getattr(transformers, name)(**{**_COMMON, **fields, **changes})


def tiny_model(config: Any, *, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@cache
def family_model(family: str) -> Any:
    return tiny_model(tiny_config(family))


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """Return random tokens, the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, VOCABULARY, (num_tokens,), generator=generator).tolist()


def traced(cached: CachedModel, prompt: list[int], num_new: int) -> tuple[Any, Trace]:
    """Generate greedily and return the generation with all its logits and KV."""
    forward = cached.forward
    recorder = Recorder(cached)
    try:
        generation = cached.generate(prompt, Sampling(max_new_tokens=num_new))
    finally:
        cached.forward = forward
    return generation, recorder.trace(generation.tokens, generation.report.ttft_seconds)


def push_out(cached: CachedModel, *tiers: str) -> None:
    """Have the tiers (default: the device) give up every page, once all offloads and persists are done."""
    assert cached.cache.flush()
    for tier in tiers or ("device",):
        cached.cache.evict(tier, 1 << 20)


_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def make_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """Return a byte-level BPE tokenizer with a chat template, trained on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = _TEMPLATE
    return fast


Wrap = Callable[..., CachedModel]
"""What the fixture `wrap` gives."""
