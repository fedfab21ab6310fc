"""Real vLLM engines in this process on a tiny model whose logits provably depend on the KV: 2 to 3 s a start."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the real engine is tested where vLLM is installed")

from kvhoist.adapters.transformers.loading import quiet_transformers  # noqa: E402
from kvhoist.demo.vllm_server import kvhoist_connector  # noqa: E402

VOCABULARY = 260
BLOCK_TOKENS = 32
PAGE_TOKENS = 64
NUM_LAYERS = 3
TOKEN_BYTES = NUM_LAYERS * 2 * 2 * 32 * 4
"""K and V of 2 heads of 32 float32 numbers, in each layer."""

PAGE_BYTES = PAGE_TOKENS * TOKEN_BYTES
_ROOM_BYTES = 64 << 20


def write_tiny_llama(folder: Path, *, seed: int = 1, **changes: Any) -> Path:
    """Save a Llama with random weights, so large that its logits depend on all of the context; return its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    quiet_transformers()
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "initializer_range": 0.2,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "dtype": "float32",
            **changes,
        }
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """Return random tokens, the same for the same arguments; another seed differs from the first token on."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return [2 + seed % 250, *torch.randint(2, VOCABULARY, (num_tokens - 1,), generator=generator).tolist()]


@dataclass(frozen=True, slots=True)
class Answer:
    """New tokens, the best log probabilities that each was chosen from, and how many tokens of the prompt were hits."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]
    cached_tokens: int


class Engine:
    """One `vllm.LLM` in this process, with the connector (`settings`) or without (None)."""

    def __init__(self, checkpoint: Path, settings: dict[str, Any] | None, **options: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        connector = None
        if settings is not None:
            role = options.pop("kv_role", "kv_both")
            connector = KVTransferConfig(**{**kvhoist_connector(**settings), "kv_role": role})
        self.llm = LLM(
            str(checkpoint),
            **{
                "skip_tokenizer_init": True,
                "enforce_eager": True,
                "dtype": "float32",
                "block_size": BLOCK_TOKENS,
                "num_gpu_blocks_override": 40,
                "kv_cache_memory_bytes": _ROOM_BYTES,
                "max_model_len": 1024,
                "max_num_seqs": 16,
                "max_num_batched_tokens": 512,
                "disable_log_stats": False,
                "kv_transfer_config": connector,
                **options,
            },
        )
        self._num_ticks = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int = 8, *, salt: str | None = None) -> list[Answer]:
        """Run all prompts at once, greedily, to the end."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, logprobs=5, ignore_eos=True, detokenize=False)
        extra = {} if salt is None else {"cache_salt": salt}
        inputs: Any = [{"prompt_token_ids": list(prompt), **extra} for prompt in prompts]
        return [_answer(output) for output in self.llm.generate(inputs, sampling, use_tqdm=False)]

    def ask(self, prompt: Sequence[int], new_tokens: int = 8, *, salt: str | None = None) -> Answer:
        return self.run([prompt], new_tokens, salt=salt)[0]

    def forget_device(self) -> None:
        """Have the device's prefix cache forget everything; the other tiers keep theirs."""
        self.settle()
        assert self.llm.reset_prefix_cache()

    # -- what is inside ------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def scheduler_side(self) -> Any:
        return self.scheduler.connector.scheduler_side

    @property
    def worker_side(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_side

    @property
    def plane(self) -> Any:
        return self.scheduler_side.plane

    def settle(self, timeout_s: float = 30.0) -> None:
        """Step until nothing is under way: what the last request left, its offloads, and what they send to storage.

        An engine without requests takes no step, so a request too short for any block carries the completions up.
        """
        deadline = time.monotonic() + timeout_s
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()
        if self.scheduler.connector is None or self.scheduler_side is None:
            return
        while self.plane.tracker.num_open:
            assert time.monotonic() < deadline, f"still under way: {self.plane.tracker.num_open} jobs"
            self._num_ticks += 1
            self.run([[2 + self._num_ticks % 250]], 1, salt=f"tick {self._num_ticks}")
            while self.scheduler.has_requests():
                self.llm.llm_engine.step()

    def counter(self, name: str, **labels: str) -> float:
        """Return a counter or gauge of vLLM's metrics, summed over the series that have these labels."""
        from prometheus_client import REGISTRY

        return sum(
            sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name in (name, f"{name}_total") and labels.items() <= sample.labels.items()
        )

    def hits(self) -> dict[str, float]:
        """Return the tokens hit so far, by tier."""
        return {tier: self.counter("vllm:kvhoist_hit_tokens", tier=tier) for tier in ("host", "storage")}

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def _answer(output: Any) -> Answer:
    chosen = output.outputs[0]
    logprobs = tuple(tuple(sorted((token, entry.logprob) for token, entry in step.items())) for step in chosen.logprobs)
    return Answer(tuple(chosen.token_ids), logprobs, output.num_cached_tokens or 0)


_kernels_registered = False


def _register_kernels_once(patch: pytest.MonkeyPatch) -> None:
    """Keep vLLM from doing so for each engine: its walk through all modules' attributes fails on those of llvmlite,
    which the first engine with an n-gram drafter has imported."""
    global _kernels_registered
    from vllm.platforms import current_platform

    if _kernels_registered:
        patch.setattr(type(current_platform), "register_triton_kernel_overrides", lambda *_: None)
    _kernels_registered = True


@contextmanager
def engine(checkpoint: Path, settings: dict[str, Any] | None = None, **options: Any) -> Iterator[Engine]:
    """Start an engine and check at the end that its cache's books add up. What vLLM changes in the process while it
    runs (torch.set_num_threads does nothing, environment variables) is put back."""
    from vllm import envs
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    environment = dict(os.environ)
    envs.disable_envs_cache()  # an engine before this one may have had vLLM remember its environment
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)
        _register_kernels_once(patch)
        try:
            opened = Engine(checkpoint, settings, **options)
        except Exception:
            ensure_kv_transfer_shutdown()  # the process would go on with what the engine that failed left there
            raise
        try:
            yield opened
            if settings is not None and opened.scheduler_side is not None:
                opened.settle()
                opened.plane.audit()
                assert opened.counter("vllm:kvhoist_audit_failures") == 0
        finally:
            opened.close()
            os.environ.clear()
            os.environ.update(environment)


def plain_answers(checkpoint: Path, requests: Sequence[tuple[Sequence[int], int]], **options: Any) -> list[Answer]:
    """Return what an engine without a connector answers to (prompt, new tokens), one after the other, whose device
    cache is so large that it keeps every prefix: the oracle."""
    with engine(checkpoint, **{"num_gpu_blocks_override": 400, **options}) as plain:
        return [plain.ask(prompt, new_tokens) for prompt, new_tokens in requests]


@dataclass(frozen=True)
class Talk:
    """A conversation whose turns end where pages end, so that hits by page and by block are of one length.

    `prompts[i]` contains everything up to question i, `answers[i]` is the oracle's.
    """

    prompts: list[list[int]]
    answers: list[Answer]

    NEW_TOKENS = 41

    def hit_tokens(self, turn: int) -> int:
        """Return how many tokens of a turn's prompt were computed in earlier ones: all but the last token, which was
        chosen and never fed in."""
        return 0 if turn == 0 else len(self.prompts[turn - 1]) + self.NEW_TOKENS - 1


def talk_of(checkpoint: Path, num_turns: int = 3, *, seed: int = 0, **options: Any) -> Talk:
    """Hold a conversation with an engine without a connector."""
    prompts = [prompt_of(600, seed)]
    answers: list[Answer] = []
    with engine(checkpoint, **{"num_gpu_blocks_override": 400, **options}) as plain:
        for turn in range(num_turns):
            answers.append(plain.ask(prompts[-1], Talk.NEW_TOKENS))
            prompts.append([*prompts[-1], *answers[-1].tokens, *prompt_of(87, seed + turn + 1)])
    return Talk(prompts[:-1], answers)
