"""The loads that the directory is measured under. Timed are the directory's own calls, not the making of keys."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvhoist.control.directory import Directory, Space
from kvhoist.control.namespace import Namespace
from kvhoist.control.tiers import Tier

RUN_PAGES = 16
CONVERSATION_PAGES = 2048
_KEY_BYTES = 32
_NUM_PROMPTS = 16
_PROMPT_PAGES = 64
_LIVE_CONVERSATIONS = 64
_FORK_SHARE = 0.1

Chain = list[bytes]


@dataclass
class Times:
    """Seconds of single calls: by the wall clock, and by this thread's CPU clock, which other processes do not move."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


def new_keys(num_pages: int) -> Chain:
    """Return keys that no chain has: random, as SHA-256's are."""
    data = os.urandom(num_pages * _KEY_BYTES)
    return [data[i : i + _KEY_BYTES] for i in range(0, len(data), _KEY_BYTES)]


class Load:
    """A directory of `num_pages` host pages, and acts on it whose times are kept."""

    def __init__(self, num_pages: int, eviction: str = "lru") -> None:
        self.num_pages = num_pages
        self.directory = Directory({Tier.HOST: num_pages}, eviction=eviction)
        self.space: Space = self.directory.space(Namespace((("model_id", "bench"),)))
        self.random = random.Random(1)

    def insert(self, keys: Sequence[bytes], start: int, times: Times) -> None:
        """Reserve and publish keys[start:]."""
        directory, space, stop = self.directory, self.space, len(keys)
        cpu = time.thread_time()
        begin = time.perf_counter()
        directory.publish(directory.reserve(space, keys, start, stop, Tier.HOST, for_whom="a request"), Tier.HOST)
        end = time.perf_counter()
        times.cpu.append(time.thread_time() - cpu)
        times.wall.append(end - begin)
        times.pages.append(stop - start)

    def use(self, keys: Sequence[bytes], times: Times) -> int:
        """Match, pin and unpin a chain; then, untimed, hit it. Returns the pages matched."""
        directory, space = self.directory, self.space
        cpu = time.thread_time()
        begin = time.perf_counter()
        matched = directory.match(space, keys)
        directory.pin(matched, Tier.HOST)
        directory.unpin(matched, Tier.HOST)
        end = time.perf_counter()
        times.cpu.append(time.thread_time() - cpu)
        times.wall.append(end - begin)
        times.pages.append(len(matched))
        directory.touch(matched)
        return len(matched)

    def runs(self, num_pages: int, times: Times, keep: int = 0) -> list[Chain]:
        """Insert conversations of CONVERSATION_PAGES, one after the other, in runs of RUN_PAGES. Returns every so many
        of them, about `keep`."""
        chains: list[Chain] = []
        stride = max(num_pages // CONVERSATION_PAGES // keep, 1) if keep else 0
        number = 0
        while num_pages > 0:
            chain = new_keys(min(CONVERSATION_PAGES, num_pages))
            for stop in range(RUN_PAGES, len(chain) + RUN_PAGES, RUN_PAGES):
                stop = min(stop, len(chain))
                self.insert(chain[:stop], (stop - 1) // RUN_PAGES * RUN_PAGES, times)
            if stride and number % stride == 0:
                chains.append(chain)
            number += 1
            num_pages -= len(chain)
        return chains

    def agentic(self, num_pages: int, times: Times) -> None:
        """Interleaved conversations under shared system prompts: each turn hits what is there and inserts RUN_PAGES;
        one in ten goes on from the middle of another conversation."""
        rng = self.random
        prompts = [new_keys(_PROMPT_PAGES) for _ in range(_NUM_PROMPTS)]
        chains = [list(rng.choice(prompts)) for _ in range(_LIVE_CONVERSATIONS)]
        unused = Times()
        while num_pages > 0:
            index = rng.randrange(len(chains))
            chain = chains[index]
            if rng.random() < _FORK_SHARE:
                other = rng.choice(chains)
                chain = other[: rng.randrange(_PROMPT_PAGES, len(other) + 1)]
            elif len(chain) >= CONVERSATION_PAGES:
                chain = list(rng.choice(prompts))
            known = self.use(chain, unused)
            chains[index] = chain = chain + new_keys(RUN_PAGES)
            self.insert(chain, known, times)
            num_pages -= times.pages[-1]

    def branches(self, num_pages: int, times: Times) -> None:
        """Insert pages that share one system prompt and nothing else: each is a branch of its own."""
        prompt = new_keys(_PROMPT_PAGES)
        while num_pages > 0:
            known = self.use(prompt, times)
            self.insert(prompt + new_keys(1), known, times)
            num_pages -= times.pages[-1]


def play(load: Load, name: str, num_pages: int, times: Times) -> None:
    """Insert `num_pages` by the load called `name`: runs, agentic, or branches."""
    acts: dict[str, Callable[[int, Times], object]] = {
        "runs": load.runs,
        "agentic": load.agentic,
        "branches": load.branches,
    }
    acts[name](num_pages, times)
