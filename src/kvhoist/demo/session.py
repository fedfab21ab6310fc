"""The demo itself: interleaved conversations on a device pool too small for them, judged turn by turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvhoist.adapters.transformers import CachedModel, Sampling
from kvhoist.demo.conversations import AFTER_RESTART, SCHEDULE, Conversation, conversations
from kvhoist.demo.oracles import KeptInMemory, Recorder, first_difference, greedy
from kvhoist.storage import FileStore

STORE_CAPACITY = "4GiB"
HOST_SHARE = 0.75
"""A turn counts as served from the host tier when at least this share of its prompt came from there, none from disk."""

OnStep = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo runs: `model` is a folder or a hub name, `folder` the FileStore's, sizes are of the tiers."""

    model: str
    folder: Path
    dtype: str = "float32"
    device_tokens: int = 2560
    host_bytes: int = 200 << 20
    page_tokens: int = 32
    new_tokens: int = 16

    @contextmanager
    def open(self) -> Iterator[CachedModel]:
        """Load the model and bind it to the store in `folder`, whose path may hold what an address cannot (a `?`)."""
        with (
            FileStore(self.folder, capacity=STORE_CAPACITY) as store,
            CachedModel.from_pretrained(
                self.model,
                dtype=self.dtype,
                page_tokens=self.page_tokens,
                device_tokens=self.device_tokens,
                host_bytes=self.host_bytes,
                store=store,
            ) as cached,
        ):
            yield cached

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_new_tokens=self.new_tokens)


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: where the prompt's KV came from, how soon the first token came, and what both oracles say.

    `difference` names the first bit that differs from oracle (a), None where none does.
    """

    who: str
    number: int
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    recomputed_tokens: int
    ttft_seconds: float
    ttft_without_seconds: float
    difference: str | None
    same_text: bool
    question: str
    answer: str

    @property
    def same_as_kept(self) -> bool:
        return self.difference is None

    @property
    def speedup(self) -> float:
        return self.ttft_without_seconds / self.ttft_seconds

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "same_as_kept": self.same_as_kept, "ttft_speedup": round(self.speedup, 2)}


class Session:
    """Plays the schedule on one CachedModel and judges every turn."""

    def __init__(self, cached: CachedModel, options: DemoOptions, on_step: OnStep) -> None:
        self._cached = cached
        self._options = options
        self._on_step = on_step
        self._recorder = Recorder(cached)
        self._kept = KeptInMemory(cached.model, options.page_tokens)
        self._talks = conversations()
        warm_up(cached)

    def play(self, on_turn: Callable[[Turn], None]) -> list[Turn]:
        turns = []
        for who in SCHEDULE:
            turns.append(self._turn(self._talks[who]))
            on_turn(turns[-1])
        return turns

    def next_prompt(self) -> tuple[Conversation, list[int]]:
        """Return the conversation that goes on after a restart, and its prompt with the next question."""
        talk = self._talks[AFTER_RESTART]
        return talk, self._cached.encode_chat(talk.ask())

    def expected_digest(self, prompt: Sequence[int], num_cached: int, num_new: int) -> str:
        """Return the digest of oracle (a) for a generation of another process."""
        self._on_step("after the restart: the prefix kept in memory")
        return self._kept.replay(prompt, num_cached, num_new).digest()

    def _turn(self, talk: Conversation) -> Turn:
        cached = self._cached
        prompt = cached.encode_chat(talk.ask())
        label = f"{talk.name}, question {talk.num_turns}"
        self._on_step(f"{label}: with kvhoist")
        generation = cached.generate(prompt, self._options.sampling)
        report = generation.report
        trace = self._recorder.trace(generation.tokens, report.ttft_seconds)
        self._on_step(f"{label}: the prefix kept in memory")
        kept = self._kept.replay(prompt, report.cached_tokens, len(generation.tokens))
        self._on_step(f"{label}: recomputing everything")
        recomputed = greedy(cached.model, prompt, self._options.new_tokens, end_tokens=cached.end_tokens)
        talk.answer(generation.text)
        return Turn(
            who=talk.name,
            number=talk.num_turns,
            prompt_tokens=report.prompt_tokens,
            device_tokens=report.device_tokens,
            host_tokens=report.host_tokens,
            disk_tokens=report.storage_tokens,
            recomputed_tokens=report.recomputed_tokens,
            ttft_seconds=report.ttft_seconds,
            ttft_without_seconds=recomputed.ttft_seconds,
            difference=first_difference(trace, kept),
            same_text=recomputed.tokens == generation.tokens,
            question=talk.messages[-2]["content"],
            answer=generation.text,
        )


STEPS_A_TURN = 3


def warm_up(cached: CachedModel) -> None:
    """Run the model's kernels once, for prefill and for a single token, so that no measured turn pays for it."""
    tokens = list(range(2, 66))
    with torch.inference_mode():
        greedy(cached.model, tokens, 2)


def host_speedup(turns: Sequence[Turn]) -> float | None:
    """Return the median speed-up of the turns that the host tier served, None where none was."""
    served = [t.speedup for t in turns if t.disk_tokens == 0 and t.host_tokens >= HOST_SHARE * t.prompt_tokens]
    return round(statistics.median(served), 2) if served else None
