"""Threads of kvhoist's own are not bound to the core that an engine bound their maker to."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

import pytest
from mover_support import HeldStore, Rank

from kvhoist.affinity import on_any_core, start
from kvhoist.memory.arena import HostArena
from kvhoist.messages import JobKind


def cores_of(*threads: threading.Thread) -> list[set[int]]:
    return [os.sched_getaffinity(thread.native_id or 0) for thread in threads]


def test_threads_run_on_any_core_of_the_process_and_their_maker_stays_where_it_was(
    one_core: tuple[int, set[int]],
) -> None:
    core, all_cores = one_core
    ended = threading.Event()
    bound, free = (threading.Thread(target=ended.wait, daemon=True) for _ in range(2))
    bound.start()
    start(free)
    assert cores_of(bound, free) == [{core}, all_cores]
    assert os.sched_getaffinity(0) == {core}
    ended.set()
    with suppress(KeyError), on_any_core():
        assert os.sched_getaffinity(0) == all_cores
        raise KeyError
    assert os.sched_getaffinity(0) == {core}


def test_threads_stay_on_several_cores_that_their_maker_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the NUMA node of a GPU, say."""
    chosen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: {2, 3} if task == 0 else set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda task, cores: chosen.append(cores))
    with on_any_core():
        assert chosen == []
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: {2} if task == 0 else set(range(8)))
    with on_any_core():
        assert chosen == [set(range(8))]
    assert chosen == [set(range(8)), {2}]


def test_where_cores_cannot_be_chosen_threads_inherit_them(
    one_core: tuple[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_setaffinity", refuse)
        start(thread)
    assert cores_of(thread) == [{one_core[0]}]
    ended.set()


def test_a_rank_uses_every_core(one_core: tuple[int, set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    ran_on: dict[str, set[int]] = {}
    run = threading.Thread.run

    def noted(thread: threading.Thread) -> None:
        ran_on[thread.name.split("_")[0]] = os.sched_getaffinity(0)
        run(thread)

    monkeypatch.setattr(threading.Thread, "run", noted)
    store = HeldStore()
    with Rank(store=store, io_options={"num_threads": 1}) as rank:
        assert not rank.offload([1], [0]).failed_pages
        assert not rank.run(JobKind.PERSIST, [1], [0]).failed_pages
    HostArena(rank.group, num_pages=1, first_touch_threads=1).close()
    names = {"kvhoist-io-0", "kvhoist-io-watch", "kvhoist-load-0", "kvhoist-offload-0", "kvhoist-touch"}
    assert ran_on.keys() == names
    assert all(cores == one_core[1] for cores in ran_on.values()), ran_on
