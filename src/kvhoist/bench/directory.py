"""The directory of a million pages against its targets: `python -m kvhoist.bench.directory` prints JSON.

Beside it, in the same run: a plain dict of the same keys, the floor of any index in Python, and SHA-256 hashing.
Medians are of single calls by the wall clock. The longest call is the longest of all, or an ordinary one into which a
full garbage collection falls; by the thread's CPU clock, so that no other process is taken for a stall.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvhoist.bench.directory_load import CONVERSATION_PAGES, Chain, Load, Times, new_keys, play
from kvhoist.bench.facts import facts
from kvhoist.bench.process import memory_bytes, run_fresh
from kvhoist.control.keys import TokenChain, chain_hashes

_SMOKE_PAGES = 10_000
_SMALL_PAGES = 10_000
_MATCHES = 200
_KEPT_CHAINS = 32
_PAGE_TOKENS = 64
_OTHER_POLICIES = ("slru", "lfu", "arc")


def run(num_pages: int = 1_000_000, smoke: bool = False) -> dict[str, Any]:
    """Measure and return plain data: `figures` (each with its target and whether it was reached), facts, `pass`.

    With `smoke` some seconds, at 10,000 pages: to see that it runs. Uses about 0.5 GB at a million pages.
    """
    num_pages = min(num_pages, _SMOKE_PAGES) if smoke else num_pages
    figures = _inserts(num_pages)
    figures += _hashing()
    for load, limit in (("runs", 350), ("agentic", 350), ("branches", 550)):
        measured = run_fresh("kvhoist.bench.directory", "--memory", load, "--pages", num_pages)
        worst = max(measured.values())
        figures.append(_figure(f"memory_{load}", worst, "bytes a page", limit, detail=measured))
    for eviction in _OTHER_POLICIES:
        figures.append(_other_policy(eviction, max(num_pages // 10, 5_000)))
    return {
        "bench": "directory",
        "num_pages": num_pages,
        "smoke": smoke,
        **facts(),
        "figures": figures,
        "pass": all(figure["pass"] for figure in figures if figure["pass"] is not None),
    }


def _inserts(num_pages: int) -> list[dict[str, Any]]:
    """Fill a directory in runs, turn it over in runs and by the agentic mix, and match in it."""
    load, grow, churn, mix_grow, mix = Load(num_pages), Times(), Times(), Times(), Times()
    load.runs(num_pages, grow)
    chains = load.runs(num_pages, churn, keep=_KEPT_CHAINS)
    matches = _matches(load, chains)
    full_gc = _seconds(gc.collect)
    num_entries = load.directory.stats().entries
    clear = _seconds(load.directory.clear)
    del load
    load = Load(num_pages)
    load.agentic(num_pages, mix_grow)
    load.agentic(num_pages, mix)
    floor = _dict_floor(num_pages)
    longest = max(max(times.cpu) for times in (grow, churn, mix, mix_grow))
    longest_wall = max(max(times.wall) for times in (grow, churn, mix, mix_grow))
    return [
        *matches,
        _insert_figure("insert_runs", grow, 3.0, floor),
        _insert_figure("insert_agentic", mix_grow, 3.0, floor),
        _insert_figure("insert_evict_runs", churn, 4.0, floor),
        _insert_figure("insert_evict_agentic", mix, 4.0, floor),
        _figure(
            "longest_call",
            max(longest, full_gc + statistics.median(churn.cpu)) * 1e3,
            "ms",
            60,
            detail={"call_cpu": longest * 1e3, "call_wall": longest_wall * 1e3, "full_collection": full_gc * 1e3},
        ),
        _figure("clear", clear / num_entries * 1e6, "us a page", None),
    ]


def _insert_figure(name: str, times: Times, target: float, floor: float) -> dict[str, Any]:
    each = [wall / pages for wall, pages in zip(times.wall, times.pages, strict=True)]
    median = statistics.median(each) * 1e6
    detail = {
        "p10": statistics.quantiles(each, n=10)[0] * 1e6,
        "p90": statistics.quantiles(each, n=10)[-1] * 1e6,
        "mean_cpu": sum(times.cpu) / sum(times.pages) * 1e6,
        "plain_dict": floor,
        "of_plain_dict": median / floor,
    }
    return _figure(name, median, "us a page", target, detail=detail)


def _matches(load: Load, chains: Sequence[Chain]) -> list[dict[str, Any]]:
    """Match, pin and unpin whole conversations, at random among all pages and, in turn, in a small directory."""
    small_load = Load(_SMALL_PAGES)
    small_chains = small_load.runs(_SMALL_PAGES // CONVERSATION_PAGES * CONVERSATION_PAGES, Times(), keep=_KEPT_CHAINS)
    rng, big, small = random.Random(2), Times(), Times()
    longest = max(len(chain) for chain in chains)
    chains = [chain for chain in chains if len(chain) == longest]
    match_big: list[float] = []
    match_small: list[float] = []
    for _ in range(_MATCHES):
        for one, pool, times, matches in (
            (load, chains, big, match_big),
            (small_load, small_chains, small, match_small),
        ):
            chain = rng.choice(pool)
            one.use(chain, times)
            begin = time.perf_counter()
            one.directory.match(one.space, rng.choice(pool))
            matches.append(time.perf_counter() - begin)
    if set(big.pages) != {longest}:
        raise AssertionError(f"conversations of {longest} pages matched {set(big.pages)}")
    median = statistics.median(big.wall) * 1e6
    ratio = statistics.median(match_big) / statistics.median(match_small)
    detail = {
        "pages": longest,
        "p10": statistics.quantiles(big.wall, n=10)[0] * 1e6,
        "p90": statistics.quantiles(big.wall, n=10)[-1] * 1e6,
        "match_alone": statistics.median(match_big) * 1e6,
    }
    return [
        _figure("match_pin_unpin", median, "us", 1000, detail=detail),
        _figure("match_of_10k", ratio, "times a match among 10,000 pages", 2.5),
    ]


def _hashing() -> list[dict[str, Any]]:
    """SHA-256 of the pages of one conversation, and of the next turn of one that is kept."""
    rng = random.Random(3)
    tokens = [rng.randrange(50_000) for _ in range(CONVERSATION_PAGES * _PAGE_TOKENS)]
    longer = tokens + [rng.randrange(50_000) for _ in range(16 * _PAGE_TOKENS)]
    whole: list[float] = []
    turn: list[float] = []
    for _ in range(5):
        whole.append(_seconds(lambda: chain_hashes(tokens, _PAGE_TOKENS)))
        chain = TokenChain(_PAGE_TOKENS)
        chain.keys(tokens)
        turn.append(_seconds(lambda chain=chain: chain.keys(longer)))  # type: ignore[misc]
        if chain.num_hashed_pages != CONVERSATION_PAGES + 16:
            raise AssertionError("a next turn hashed more than its new pages")
    return [
        _figure("hash", min(whole) / CONVERSATION_PAGES * 1e6, "us a new page of 64 tokens (best of 5)", 1.5),
        _figure("hash_next_turn", min(turn) * 1e6, "us a turn of 16 pages after 2,048 (best of 5)", None),
    ]


def _dict_floor(num_pages: int) -> float:
    """Return the median µs a page of putting runs of 16 keys into a plain dict and taking 16 others out."""
    keys: dict[bytes, int] = {}
    each: list[float] = []
    order: deque[Chain] = deque()
    for first in range(0, 2 * num_pages, 16):
        new = new_keys(16)
        order.append(new)
        old = order.popleft() if first >= num_pages else []
        begin = time.perf_counter()
        for row, key in enumerate(new, first):
            keys[key] = row
        for key in old:
            del keys[key]
        if old:
            each.append((time.perf_counter() - begin) / 16)
    return statistics.median(each) * 1e6


def _other_policy(eviction: str, num_pages: int) -> dict[str, Any]:
    load, grow, mix = Load(num_pages, eviction), Times(), Times()
    load.runs(num_pages, grow)
    load.agentic(num_pages, mix)
    load.directory.audit()
    each = [wall / pages for wall, pages in zip(mix.wall, mix.pages, strict=True)]
    detail = {"num_pages": num_pages}
    return _figure(f"insert_evict_agentic_{eviction}", statistics.median(each) * 1e6, "us a page", None, detail=detail)


# -- memory ------------------------------------------------------------------------------------------------------


def _memory(name: str, num_pages: int) -> dict[str, float]:
    load, times = Load(num_pages), _Forgetful()
    gc.collect()
    before = memory_bytes()["VmRSS"]
    play(load, name, num_pages, times)
    gc.collect()
    full = (memory_bytes()["VmRSS"] - before) / num_pages
    play(load, name, num_pages, times)
    gc.collect()
    return {"full": full, "turned_over": (memory_bytes()["VmRSS"] - before) / num_pages}


class _Forgetful(Times):
    """Keeps no more than the last call, so that the measurement's own lists are not measured."""

    def __init__(self) -> None:
        super().__init__(_Last(), _Last(), _Last())


class _Last(list[Any]):
    def append(self, value: Any) -> None:
        self[:] = [value]


# -- frame -------------------------------------------------------------------------------------------------------


def _figure(
    name: str, value: float, unit: str, target: float | None, *, detail: dict[str, Any] | None = None
) -> dict[str, Any]:
    reached = None if target is None else value <= target
    return {"name": name, "value": value, "unit": unit, "target": target, "pass": reached, **(detail or {})}


def _seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def main() -> None:
    """Print the figures, or with --memory the bytes a page of this process, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--memory", choices=("runs", "agentic", "branches"))
    arguments = parser.parse_args()
    if arguments.memory:
        print(json.dumps(_memory(arguments.memory, arguments.pages)))
    else:
        print(json.dumps(run(arguments.pages, arguments.smoke), indent=2))


if __name__ == "__main__":
    main()
