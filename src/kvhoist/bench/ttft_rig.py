"""A Llama with random weights behind a CachedModel, made to answer from the tier that a measurement asks for."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from kvhoist.adapters.transformers import PREFIX_ATTENTION, CachedModel, GenerationReport, Sampling
from kvhoist.config import CacheConfig
from kvhoist.errors import KvhoistError
from kvhoist.platform.base import CPU, Device

_ONE = Sampling(max_new_tokens=1, stop_tokens=())
_NEVER = 1 << 30  # hits after which a page is offloaded unasked


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """What decides how long a Llama takes: its sizes. Defaults are those of Llama 3 8B."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 14336
    vocabulary: int = 128256
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return (
            f"Llama of {self.layers} layers, hidden {self.hidden}, {self.heads} heads, {self.kv_heads} KV heads of "
            f"{self.hidden // self.heads}, intermediate {self.intermediate}, vocabulary {self.vocabulary}, {self.dtype}"
        )


def build(shape: LlamaShape, device: Device, max_tokens: int, attention: str) -> Any:
    """Return the model with weights drawn on `device` itself (normal, deviation 0.02), for up to `max_tokens`."""
    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        max_position_embeddings=max_tokens,
        initializer_range=0.02,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(str(device)):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, shape.dtype), attn_implementation=attention
        )
    return model.eval()


@dataclass(frozen=True, slots=True)
class Answer:
    """The first token of a prompt: the wall clock's seconds from the call to it, the logits that it was chosen from
    (float32, on the CPU), where the prefix came from."""

    token: int
    seconds: float
    logits: torch.Tensor
    report: GenerationReport

    def same_bits(self, other: Answer) -> bool:
        return self.token == other.token and torch.equal(self.logits, other.logits)

    def largest_difference(self, other: Answer) -> float:
        """Return the largest difference of a logit, in standard deviations of the logits."""
        return float((self.logits - other.logits).abs().max() / other.logits.std())


class Rig(ExitStack):
    """The model and its cache: use it as a context manager. Only `keep` brings pages to the host tier, so that the
    suffixes that are computed over a prefix are gone with the device tier."""

    def __init__(
        self,
        shape: LlamaShape,
        device: Device,
        *,
        page_tokens: int,
        longest: int,
        page_room: float = 1.5,
        attention: str = PREFIX_ATTENTION,
    ) -> None:
        super().__init__()
        self.vocabulary = shape.vocabulary
        self._device = device
        model = build(shape, device, longest + 1, attention)
        row_bytes = 2 * shape.kv_heads * (shape.hidden // shape.heads) * getattr(torch, shape.dtype).itemsize
        self.cached = self.enter_context(
            CachedModel(
                model,
                page_tokens=page_tokens,
                device_tokens=2 * (longest + page_tokens),
                host_bytes=int(page_room * longest * row_bytes * shape.layers),
                cache_config=CacheConfig(write_policy="write_through_selective", min_hits=_NEVER),
                weights_id=f"random, {shape}",
            )
        )
        self._logits: list[torch.Tensor] = []
        self.cached.forward = _Listening(self.cached.forward, self._logits)  # type: ignore[assignment]

    def describe(self) -> dict[str, str]:
        """Return what a measurement's reader needs to know of device and libraries."""
        name = "cpu" if self._device == CPU else torch.cuda.get_device_name(str(self._device))
        return {"name": name, "torch": torch.__version__, "transformers": transformers.__version__}

    def tokens(self, count: int, seed: str) -> list[int]:
        return random.Random(seed).choices(range(self.vocabulary), k=count)

    def keep(self, prefix: list[int]) -> None:
        """Compute the prefix and have its pages in the host tier. Raises KvhoistError where that has no room."""
        cache = self.cached.cache
        self.first_token([*prefix, 0])
        transfer = cache.offload(cache.match(prefix))
        if transfer is not None:
            transfer.wait()
        if cache.match(prefix).num_tokens < len(prefix):
            raise KvhoistError("the host tier did not take the whole prefix", got=f"{len(prefix)} tokens")

    def only_in_host(self) -> None:
        """Leave the device tier empty, and nothing under way."""
        self.cached.cache.flush()
        self.cached.cache.evict("device", self.cached.pool.num_pages)

    def first_token(self, prompt: list[int], *, layerwise: bool = True, salt: bytes = b"") -> Answer:
        """Answer `prompt` with one token, from wherever its prefix is. With another `salt` nothing is found."""
        self.cached.prefixes.layerwise = layerwise
        self._logits.clear()
        self._synchronize()
        began = time.perf_counter()
        with self.cached.stream(prompt, _ONE, salt=salt) as stream:
            token = next(stream).token  # on the CPU: all work for it is done
            seconds = time.perf_counter() - began
        return Answer(token, seconds, self._logits[-1][0].float().cpu(), stream.result.report)

    def _synchronize(self) -> None:
        if self._device != CPU:
            torch.cuda.synchronize(str(self._device))


class _Listening:
    """Stands in for a CachedModel's forward and notes the logits."""

    def __init__(self, forward: Any, logits: list[torch.Tensor]) -> None:
        self.model, self.shape = forward.model, forward.shape
        self._forward, self._logits = forward, logits

    def __call__(self, *arguments: Any) -> torch.Tensor:
        logits: torch.Tensor = self._forward(*arguments)
        self._logits.append(logits)
        return logits
