"""A tiny Llama with random weights and a tokenizer of its own: an engine that starts in seconds, for smoke runs."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 512
_LONGEST = 4096


def write_tiny_model(folder: Path) -> Path:
    """Save it to `folder` and return that. The weights are so large that the logits depend on all of the context; the
    tokenizer knows the words `t0` to `t511`. The same bytes every time."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=_LONGEST,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t1"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t1", eos_token="t0").save_pretrained(folder)
    return folder
