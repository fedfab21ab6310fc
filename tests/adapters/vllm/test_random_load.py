"""Seeded random load over vLLM's real scheduler: every byte that attention reads is checked, nothing leaks or hangs.

KVHOIST_SOAK_SECONDS makes it longer; KVHOIST_SOAK_SEED begins with another seed (one that failed is in the message).
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from vllm_harness_load import Episode

from kvhoist.adapters.vllm.scheduler import SchedulerSide
from kvhoist.adapters.vllm.worker import WorkerSide
from kvhoist.memory.arena import HostArena
from kvhoist.mover import Mover

SECONDS = float(os.environ.get("KVHOIST_SOAK_SECONDS", "30"))
SEED = int(os.environ.get("KVHOIST_SOAK_SEED", "1"))
MAX_GROWTH_BYTES = 24 << 20
"""What the allocator may keep; a host tier or a directory leaked by each engine would be more."""


def live_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def test_engines_under_random_load(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for name in ("kvhoist", "vllm"):  # records of planted failures keep what their tracebacks hold
        caplog.set_level(logging.CRITICAL + 1, logger=name)
    counts: Counter[str] = Counter()
    started = time.monotonic()
    seed, rss = SEED, [0.0, 0.0]
    while time.monotonic() < started + SECONDS:
        episode = Episode(checkpoint, tmp_path / str(seed), seed)
        try:
            episode.run(400, deadline=started + max(SECONDS, 5.0))
        except BaseException as problem:
            problem.add_note(f"KVHOIST_SOAK_SEED={seed}: {episode.options}, {episode.settings}, {dict(episode.counts)}")
            raise
        counts.update(episode.counts)
        counts["engines"] += 1
        del episode
        seed += 1
        half = int(time.monotonic() > started + SECONDS / 2)
        rss[half] = max(rss[half], live_bytes())
    assert counts["external tokens"] > 0 or counts["engines"] < 8
    gc.collect()
    alive = [one for one in gc.get_objects() if isinstance(one, (SchedulerSide, WorkerSide, Mover, HostArena))]
    assert alive == [], "engines that were closed are kept"
    if rss[0] and SECONDS >= 20:
        assert rss[1] - rss[0] < MAX_GROWTH_BYTES, f"{(rss[1] - rss[0]) / (1 << 20):+.0f} MiB in the second half"
    grown = f"{(rss[1] - rss[0]) / (1 << 20):+.0f} MiB in the second half"
    with capsys.disabled():
        print(f"\nrandom load, seeds {SEED} to {seed - 1}, {SECONDS:.0f} s, {grown}: {dict(sorted(counts.items()))}")
