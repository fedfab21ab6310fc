"""vLLM itself under seeded random load: arrivals, aborts, evictions, resets, restarts; every load is checked.

KVHOIST_SOAK_SECONDS makes it longer, KVHOIST_SOAK_SEED another one: `KVHOIST_SOAK_SECONDS=1800 scripts/test -n 0 -s
tests/adapters/vllm/test_engine_soak.py`.
"""

from __future__ import annotations

import gc
import os
import random
import time
from pathlib import Path
from typing import Any

from vllm_models import Engine, engine, prompt_of, write_tiny_llama

SECONDS = float(os.environ.get("KVHOIST_SOAK_SECONDS", "120"))
SEED = int(os.environ.get("KVHOIST_SOAK_SEED", "1"))
ENGINE_SECONDS = max(15.0, SECONDS / 20)
MAX_GROWTH_BYTES = 96 << 20
"""What the allocator, vLLM's own tables and first uses may take once warm; a page leaked a second would be more."""


class Load:
    """Requests of a few conversations with shared beginnings, in a random order, against one engine after another.

    Greedy answers are remembered by prompt: whoever asks the same again must get the same, from whatever tier.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.answers: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.open: dict[str, tuple[int, ...]] = {}
        self.prompts = [self._prompt(i) for i in range(24)]
        self.counts = dict.fromkeys(("finished", "again", "aborted", "resets", "hits", "restarts"), 0)
        self._number = 0

    def _prompt(self, i: int) -> list[int]:
        shared = prompt_of(64 * (1 + i % 4), 500 + i % 3)
        return [*shared, *prompt_of(self.draw.randrange(20, 300), i)]

    def step(self, opened: Engine) -> None:
        """Do one random thing, and one step of the engine."""
        dice = self.draw.random()
        if dice < 0.12 and len(self.open) < 24:
            self._arrive(opened)
        elif dice < 0.135 and self.open:
            name = self.draw.choice(sorted(self.open))
            opened.llm.llm_engine.abort_request([name])
            del self.open[name]
            self.counts["aborted"] += 1
        elif dice < 0.139:
            self._reset(opened)
        for output in opened.llm.llm_engine.step():
            if output.finished and output.request_id in self.open:
                self._finish(output)

    def drain(self, opened: Engine, deadline: float) -> None:
        while opened.scheduler.has_requests():
            assert time.monotonic() < deadline, f"hangs with {sorted(self.open)} open"
            for output in opened.llm.llm_engine.step():
                if output.finished and output.request_id in self.open:
                    self._finish(output)
        assert not self.open

    def _arrive(self, opened: Engine) -> None:
        from vllm import SamplingParams

        prompt = self.draw.choice(self.prompts)
        known = self.answers.get(tuple(prompt))
        if known is not None and self.draw.random() < 0.3:  # the conversation goes on
            at = self.prompts.index(prompt)
            longer = [*prompt, *known, *prompt_of(self.draw.randrange(3, 40), self.draw.randrange(250))]
            prompt = self.prompts[at] = longer if len(longer) < 900 else self._prompt(at)
        self._number += 1
        name = f"r{self._number}"
        tokens = 16 + sum(prompt[:7]) % 48
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.open[name] = tuple(prompt)
        opened.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def _finish(self, output: Any) -> None:
        prompt, tokens = self.open.pop(output.request_id), tuple(output.outputs[0].token_ids)
        self.counts["finished"] += 1
        self.counts["hits"] += bool(output.num_cached_tokens)
        if prompt in self.answers:
            self.counts["again"] += 1
            assert tokens == self.answers[prompt], f"{output.request_id} got another answer than before (seed {SEED})"
        elif len(self.answers) < 5000:
            self.answers[prompt] = tokens

    def _reset(self, opened: Engine) -> None:
        running = self.draw.random() < 0.5 and not _holds_blocks_outside_of_the_batch(opened)
        opened.llm.reset_prefix_cache(reset_running_requests=running, reset_connector=self.draw.random() < 0.5)
        self.counts["resets"] += 1


def test_random_load_gives_no_wrong_page_and_leaves_nothing_behind(tmp_path: Path) -> None:
    llama = write_tiny_llama(tmp_path / "llama")
    load = Load(SEED)
    end = time.monotonic() + SECONDS
    resident: list[int] = []
    while time.monotonic() < end:
        settings = {
            "host_bytes": "3MiB",
            "storage": f"file:{tmp_path / 'kv'}?capacity=64MiB",
            "debug_verify": True,
            "layerwise": load.draw.random() < 0.25,
            "write_policy": "write_through_selective" if load.draw.random() < 0.2 else "write_through",
            "min_hits": 1,
        }
        with engine(llama, settings, num_gpu_blocks_override=48, max_num_seqs=8) as opened:
            until = min(end, time.monotonic() + ENGINE_SECONDS)
            while time.monotonic() < until:
                load.step(opened)
            load.drain(opened, time.monotonic() + 120)
            opened.settle()
            _check(opened)
        load.counts["restarts"] += 1
        del opened
        gc.collect()
        resident.append(_resident_bytes())
    print(f"seed {SEED}: {load.counts}, resident MiB {[n >> 20 for n in resident]}")
    assert load.counts["finished"] > SECONDS / 10
    assert load.counts["again"] > 0
    assert load.counts["hits"] > 0
    half = len(resident) // 2
    if half > 2:
        assert min(resident[half:]) - min(resident[2:half]) < MAX_GROWTH_BYTES, "memory grows from engine to engine"


def _check(opened: Engine) -> None:
    """Assert that the cache and vLLM's block pool hold nothing of requests that are gone."""
    opened.ask(prompt_of(5, 3), 1)  # carries the last counts up
    side, host = opened.scheduler_side, opened.plane.directory.stats().tiers["host"]
    opened.plane.audit()
    assert opened.plane.tracker.num_open == 0
    assert (host.filling_pages, host.free_pages + host.ready_pages) == (0, host.capacity_pages)
    assert (side._states, len(side._offering), len(side._open_loads), len(side._fences)) == ({}, 0, 0, 0)
    assert opened.counter("vllm:kvhoist_mismatched_pages") == 0
    assert opened.counter("vllm:kvhoist_failed_pages", kind="load") == 0
    pool = opened.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "vLLM's null block is the only one in use"


def _holds_blocks_outside_of_the_batch(opened: Engine) -> bool:
    """Tell whether a request that loads, or was aborted while it did, has blocks: vLLM cannot reset under those."""
    manager = opened.scheduler.kv_cache_manager
    return any(
        request.status.name != "RUNNING" and any(manager.get_block_ids(name))
        for name, request in opened.scheduler.requests.items()
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
