"""Requests that load never hold the blocks that each other, or those before them, need."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus
from vllm_harness import SimEngine, prompt_of
from vllm_harness_faults import slow_copies
from vllm_harness_kvhoist import num_jobs, settle

from kvhoist.adapters.vllm import compat
from kvhoist.adapters.vllm.room import Room
from kvhoist.messages import JobKind


def request(name: str, num_tokens: int) -> Any:
    return SimpleNamespace(request_id=name, num_tokens=num_tokens, num_computed_tokens=0, status=RequestStatus.WAITING)


def load(room: Room, one: Any) -> bool:
    admitted = room.admits(one, loads=True)
    if admitted:
        one.status, one.num_computed_tokens = RequestStatus.WAITING_FOR_REMOTE_KVS, one.num_tokens - 1
    return admitted


def test_requests_load_as_long_as_all_of_them_fit_at_their_full_length() -> None:
    room = Room(10, 4, 0)
    first, second, third = request("a", 18), request("b", 14), request("c", 2)  # 5, 4, and 1 blocks
    assert load(room, first)
    assert load(room, second)
    assert load(room, third)
    assert not load(room, request("d", 1))


def test_a_request_alone_may_always_load() -> None:
    assert load(Room(10, 4, 3), request("a", 40))


def test_small_loads_do_not_overtake_a_large_one_for_ever() -> None:
    room = Room(10, 4, 0)
    running, large = request("a", 18), request("b", 30)
    assert load(room, running)
    assert not load(room, large)
    assert not load(room, request("c", 2))
    running.status = RequestStatus.RUNNING
    assert load(room, large)


@pytest.mark.parametrize("gone", ["forgotten", "scheduled without a load"])
def test_a_large_one_that_no_longer_waits_holds_nobody_back(gone: str) -> None:
    room = Room(10, 4, 0)
    large = request("b", 30)
    assert load(room, request("a", 18))
    assert not load(room, large)
    if gone == "forgotten":
        room.forget("b")
    else:
        room.admits(large, loads=False)
    assert load(room, request("c", 2))


def test_what_has_loaded_goes_first_while_nothing_runs() -> None:
    room = Room(10, 4, 0)
    loaded, other = request("a", 18), request("b", 30)
    assert load(room, loaded)
    assert room.admits(other, loads=False), "the load is under way"
    room.arrived(["a"])
    assert not room.admits(other, loads=False)
    loaded.status = RequestStatus.RUNNING
    assert room.admits(other, loads=False)


@pytest.mark.parametrize("engine_options", [{}, {"async_scheduling": True, "num_spec": 3}, {"policy": "priority"}])
def test_an_engine_whose_release_keeps_no_room_does_not_wait_for_ever(
    sim: Callable[..., SimEngine], engine_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On newer releases this only shows that our own rule does no harm beside vLLM's."""
    monkeypatch.setattr(compat, "KEEPS_ROOM_FOR_LOADS", False)
    engine = sim(blocks=24, max_batched=32, **engine_options)
    with slow_copies(1):
        for i in range(120):
            engine.add([*prompt_of(str(i % 3), 8 + i * 7 % 25), i % 5], 1 + i * 11 % 29, priority=i % 3)
            for _ in range(i % 3):
                engine.step()
            if i % 9 == 0:
                engine.reset()
        settle(engine)
    assert num_jobs(engine, JobKind.LOAD) > 0
