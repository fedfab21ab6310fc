"""A model made of hashes: the KV of a position says which tokens, salt, layer and rank it stands for.

What attention reads is known for every position, so one wrong byte is seen when it is read, and the next token depends
on the whole context, so outputs can be compared between engines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

VOCAB = 997
NUM_LAYERS = 3
NUM_HEADS = 2
HEAD_DIM = 8
MAX_MODEL_LEN = 512

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
Words = npt.NDArray[np.uint64]


def _mix(value: int) -> int:
    """SplitMix64's finaliser."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _mix_words(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Words = words ^ (words >> np.uint64(31))
    return result


def first_state(salt: str) -> int:
    return _mix(int.from_bytes(salt.encode()[-8:] or b"\0", "little") + _GOLDEN * (len(salt) + 1) & _MASK)


def next_state(state: int, token: int) -> int:
    return _mix((state * 3 + (token + 2) * _GOLDEN) & _MASK)


def next_token(state: int) -> int:
    """The token that the model samples after a context of this state."""
    return _mix(state ^ 0x5EED) % VOCAB


def draft_tokens(state: int, num_tokens: int, accept_tenths: int = 6) -> list[int]:
    """What a drafter proposes after a context of this state: each token right in `accept_tenths` of ten cases."""
    drafts = []
    for _ in range(num_tokens):
        token = next_token(state)
        if _mix(state ^ 0xD4AF7) % 10 >= accept_tenths:
            token = (token + 1) % VOCAB
        drafts.append(token)
        state = next_state(state, token)
    return drafts


def generate(prompt: list[int], num_tokens: int, salt: str = "") -> list[int]:
    """What the model says to `prompt`: the oracle of every engine's output."""
    context = Context(prompt, salt)
    for _ in range(num_tokens):
        context.append(next_token(context.states[-1]))
    return context.tokens[len(prompt) :]


def prompt_of(name: str, num_tokens: int) -> list[int]:
    """Make up a prompt. Prompts of one name are prefixes of each other."""
    state = first_state(name)
    tokens = []
    for _ in range(num_tokens):
        state = _mix(state + _GOLDEN & _MASK)
        tokens.append(state % VOCAB)
    return tokens


class Context:
    """Tokens of one request and the model's state after each of them."""

    def __init__(self, tokens: list[int], salt: str) -> None:
        self.tokens: list[int] = []
        self.states: list[int] = []
        self.salt = salt
        self._first = first_state(salt)
        for token in tokens:
            self.append(token)

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        state = self.states[-1] if self.states else self._first
        self.tokens.append(token)
        self.states.append(next_state(state, token))

    def truncate(self, num_tokens: int) -> None:
        del self.tokens[num_tokens:]
        del self.states[num_tokens:]

    def replace(self, tokens: list[int]) -> None:
        """Become `tokens`, keeping what is shared with the tokens so far."""
        shared = 0
        for old, new in zip(self.tokens, tokens, strict=False):
            if old != new:
                break
            shared += 1
        self.truncate(shared)
        for token in tokens[shared:]:
            self.append(token)


class KvBytes:
    """Which words the KV of a position holds in each layer of one rank: [positions, layers, words]."""

    def __init__(self, layers: list[int], words_per_token: int, rank: int) -> None:
        index = np.arange(words_per_token, dtype=np.uint64)[None, :]
        layer = np.array(layers, dtype=np.uint64)[:, None]
        self._masks = _mix_words(index * np.uint64(_GOLDEN) + layer * np.uint64(0x10001) + np.uint64(rank * 7919))

    def of_states(self, states: list[int]) -> Words:
        return _mix_words(np.array(states, dtype=np.uint64)[:, None, None] ^ self._masks[None])


def write_checkpoint(folder: Path, *, num_layers: int = NUM_LAYERS, seed: int = 0) -> Path:
    """Write a tiny Llama checkpoint: a config, and weights that only a fingerprint ever reads."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": NUM_HEADS * HEAD_DIM,
        "intermediate_size": 32,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)).half()
    save_file({"model.embed_tokens.weight": weights}, folder / "model.safetensors")
    return folder
