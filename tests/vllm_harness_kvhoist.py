"""What tests look at in KvhoistConnector under a SimEngine: its books, its pages, its idleness."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_harness import SimEngine

from kvhoist.control.tiers import Tier
from kvhoist.messages import JobKind

PAGE_PITCH = 4096
"""Bytes of one host page of the simulated model, with up to 16 tokens a page."""


def host_bytes(num_pages: int, num_ranks: int = 1) -> int:
    return num_pages * PAGE_PITCH * num_ranks


def store_in(folder: Path, capacity: str = "16MiB") -> str:
    """Name a store in `folder`, small, so that its segments are."""
    return f"file:{folder}?capacity={capacity}"


def side(engine: SimEngine) -> Any:
    """The scheduler's side of the connector."""
    found = engine.connector.scheduler_side
    assert found is not None, "the cache is off"
    return found


def movers(engine: SimEngine) -> list[Any]:
    return [worker.connector.worker_side._mover for worker in engine.workers]


def num_jobs(engine: SimEngine, kind: JobKind) -> int:
    """Count the finished jobs of one kind."""
    return int(side(engine).plane.flights.counters[kind].jobs)


def host_pages(engine: SimEngine) -> int:
    """Count the pages that the host tier could give at once."""
    return int(side(engine).plane.directory.stats().tiers[str(Tier.HOST)].ready_pages)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Poll until `condition()`. Raises AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.001)


def settle(engine: SimEngine, timeout_s: float = 20.0) -> None:
    """Run to the end, and go on with tiny requests (which hit nothing and offer nothing) until no job is open."""
    engine.run()
    plane = side(engine).plane
    deadline = time.monotonic() + timeout_s
    while plane.tracker.num_open:
        assert time.monotonic() < deadline, f"jobs stay open: {plane.tracker.jobs()}"
        for mover in movers(engine):
            assert mover.wait_idle(timeout_s), "a mover does not end its jobs"
        engine.ask([0], 1)
        engine.run()


def audit(engine: SimEngine) -> None:
    """Assert that the connector's books add up."""
    side(engine).plane.audit()


def remembered(engine: SimEngine) -> dict[str, int]:
    """Count what the scheduler's side remembers of requests, blocks and jobs, by the path of each collection that is
    not empty. Metrics and failures remembered for a while (bounded by their own rules) are left out."""
    sizes: dict[str, int] = {}

    def look(part: Any, path: str) -> None:
        for name in (*getattr(type(part), "__slots__", ()), *getattr(part, "__dict__", ())):
            value = getattr(part, name)
            if isinstance(value, (dict, list, set, deque)):
                if value and name not in ("_refused",):
                    sizes[f"{path}{name}"] = len(value)
            elif type(value).__module__.startswith("kvhoist.adapters.vllm") and name != "counts":
                look(value, f"{path}{name}.")

    look(side(engine), "")
    return sizes


def assert_nothing_kept(engine: SimEngine) -> None:
    """Assert, where no job is open, that no host page is pinned or being filled: every one of them can be evicted."""
    directory = side(engine).plane.directory
    ready = host_pages(engine)
    stats = directory.stats().tiers[str(Tier.HOST)]
    assert stats.filling_pages == 0
    evicted = directory.evict(Tier.HOST, ready)
    assert len(evicted) == ready, f"{ready - len(evicted)} of {ready} pages are pinned by nobody alive"
    assert directory.stats().tiers[str(Tier.HOST)].free_pages == stats.capacity_pages
    directory.audit()


def parts_of(engine: SimEngine) -> list[Any]:
    """The worker's sides of the connector, one a rank."""
    return [worker.connector.worker_side for worker in engine.workers]


def end(engine: SimEngine) -> None:
    """Run the engine dry; check outputs, blocks, books and pages; close it, and check that nothing of it is left."""
    settle(engine)
    engine.finish()
    audit(engine)
    assert remembered(engine) == {}
    assert_nothing_kept(engine)
    parts = parts_of(engine)
    arenas = [part.arena for part in parts]
    threads = [thread for part in parts for thread in threads_of(part)]
    del parts
    engine.close()
    wait_for(lambda: not any(thread.is_alive() for thread in threads), "threads end")
    wait_for(lambda: not any(arena.held_bytes for arena in arenas), "host memory is given back")


@contextmanager
def ended(engine: SimEngine) -> Iterator[SimEngine]:
    """`end` the engine on leaving, unless the test did or failed."""
    try:
        yield engine
        if not engine.is_closed:
            end(engine)
    finally:
        engine.close()


def threads_of(part: Any) -> list[threading.Thread]:
    attached = part.stores.current
    copying = [thread for lane in part._mover._lanes.values() for thread in lane._threads]
    return [*copying, *(attached.io._threads if attached is not None else ())]
