"""The whole demo: the conversations, the restart, and what they came to."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvhoist.demo.conversations import AFTER_RESTART, SCHEDULE
from kvhoist.demo.restart import answer_in_new_process
from kvhoist.demo.session import STEPS_A_TURN, DemoOptions, OnStep, Session, Turn, host_speedup

NUM_STEPS = len(SCHEDULE) * STEPS_A_TURN + 3
TARGET_SPEEDUP_HOST, TARGET_SPEEDUP_DISK = 8, 5


@dataclass(frozen=True)
class DemoResult:
    """All turns, the one after the restart, and the counters of the first process."""

    options: DemoOptions
    turns: tuple[Turn, ...]
    restarted: Turn
    evicted_pages: Mapping[str, int]
    seconds: float

    @property
    def all_turns(self) -> tuple[Turn, ...]:
        return (*self.turns, self.restarted)

    @property
    def same_as_kept(self) -> bool:
        return all(turn.same_as_kept for turn in self.all_turns)

    @property
    def same_text(self) -> bool:
        return all(turn.same_text for turn in self.all_turns)

    @property
    def identical(self) -> bool:
        """Both oracles in fp32; in other dtypes the one that is exact there."""
        return self.same_as_kept and (self.same_text or self.options.dtype != "float32")

    @property
    def ttft_speedup_host(self) -> float | None:
        """The median of the turns that the host tier served, None where none was."""
        return host_speedup(self.turns)

    @property
    def ttft_speedup_disk(self) -> float:
        return round(self.restarted.speedup, 2)

    def to_dict(self) -> dict[str, Any]:
        options = self.options
        return {
            "turns": [turn.to_dict() for turn in self.turns],
            "after_restart": self.restarted.to_dict(),
            "identical": self.identical,
            "same_as_kept_in_memory": self.same_as_kept,
            "same_text_as_recomputed": self.same_text,
            "ttft_speedup_host": self.ttft_speedup_host,
            "ttft_speedup_disk": self.ttft_speedup_disk,
            "targets": {"ttft_speedup_host": TARGET_SPEEDUP_HOST, "ttft_speedup_disk": TARGET_SPEEDUP_DISK},
            "tokens": {
                name: sum(getattr(turn, f"{name}_tokens") for turn in self.all_turns)
                for name in ("prompt", "device", "host", "disk", "recomputed")
            },
            "evicted_pages": dict(self.evicted_pages),
            "model": options.model,
            "dtype": options.dtype,
            "device_tokens": options.device_tokens,
            "host_bytes": options.host_bytes,
            "page_tokens": options.page_tokens,
            "new_tokens": options.new_tokens,
            "machine": {
                "cpu": platform.processor() or platform.machine(),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "seconds": round(self.seconds, 1),
        }


def run_demo(options: DemoOptions, *, on_step: OnStep, on_turn: Callable[[Turn], None]) -> DemoResult:
    """Play all conversations, restart on the same folder, and judge. `on_step` is called NUM_STEPS times with what is
    about to be done, `on_turn` after each turn of the first process."""
    started_at = time.perf_counter()
    on_step("loading the model")
    with options.open() as cached:
        session = Session(cached, options, on_step)
        turns = session.play(on_turn)
        talk, prompt = session.next_prompt()
        cached.cache.flush()
        cached.cache.audit()
        tiers = cached.cache.stats().directory.tiers
    on_step("a new process on the same folder, the page cache dropped")
    reply = answer_in_new_process(options, prompt)
    report = reply["report"]
    num_cached = report["prompt_tokens"] - report["recomputed_tokens"]
    digest = session.expected_digest(prompt, num_cached, len(reply["tokens"]))
    restarted = Turn(
        who=AFTER_RESTART,
        number=talk.num_turns,
        prompt_tokens=report["prompt_tokens"],
        device_tokens=report["device_tokens"],
        host_tokens=report["host_tokens"],
        disk_tokens=report["storage_tokens"],
        recomputed_tokens=report["recomputed_tokens"],
        ttft_seconds=report["ttft_seconds"],
        ttft_without_seconds=reply["ttft_without_seconds"],
        difference=None if digest == reply["digest"] else "logits or KV",
        same_text=reply["tokens"] == reply["recomputed_tokens"],
        question=talk.messages[-1]["content"],
        answer=reply["text"],
    )
    evicted = {name: tier.evicted_pages for name, tier in tiers.items()}
    return DemoResult(options, tuple(turns), restarted, evicted, time.perf_counter() - started_at)
