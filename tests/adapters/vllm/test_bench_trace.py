"""Traces for vLLM servers: seeded conversations, Mooncake's format, and what a player sees of a server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhoist.demo.vllm_load import RequestFailedError, percentiles, play
from kvhoist.demo.vllm_throughput import interval
from kvhoist.demo.vllm_trace import ConversationSizes, Trace, TraceRequest, conversations, mooncake
from kvhoist.errors import ConfigError

SIZES = ConversationSizes(conversations=3, turns=3, prompt_tokens=20, shared_tokens=8, turn_tokens=5, new_tokens=4)


def answers_of(trace: Trace) -> dict[str, list[int]]:
    return {request.name: [1000 + i for i in range(request.new_tokens)] for request in trace.requests}


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    trace = conversations(SIZES, 300, seed=1)
    answers = answers_of(trace)
    for request in trace.requests:
        prompt = request.prompt(answers)
        assert len(prompt) == request.num_prompt_tokens
        assert tuple(prompt[-len(request.own) :]) == request.own
        if request.follows is not None:
            assert request.turn == request.follows.turn + 1
            before = [*request.follows.prompt(answers), *answers[request.follows.name]]
            assert prompt[: len(before)] == before


def test_conversations_share_their_shared_tokens_and_nothing_else() -> None:
    trace = conversations(SIZES, 30_000, seed=1)
    firsts = [request.own for request in trace.requests if request.turn == 1]
    assert len(firsts) == SIZES.conversations
    assert len({own[: SIZES.shared_tokens] for own in firsts}) == 1
    assert len({own[SIZES.shared_tokens] for own in firsts}) == SIZES.conversations


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**32))
def test_turns_interleave_and_come_in_order(num_conversations: int, turns: int, seed: int) -> None:
    trace = conversations(ConversationSizes(num_conversations, turns, 5, 0, 2, 1), 100, seed)
    assert [request.turn for request in trace.requests] == sorted(request.turn for request in trace.requests)
    seen = set()
    for request in trace.requests:
        assert request.follows is None or request.follows.name in seen
        seen.add(request.name)
    assert len(seen) == num_conversations * turns
    assert trace == conversations(ConversationSizes(num_conversations, turns, 5, 0, 2, 1), 100, seed)


def test_the_working_set_is_what_all_conversations_hold_at_their_ends() -> None:
    trace = conversations(SIZES, 300, seed=1)
    whole = 20 + 2 * 5 + 3 * 4
    assert trace.working_set_tokens == 3 * whole
    assert trace.longest_tokens == whole


@pytest.mark.parametrize("wrong", [{"turns": 0}, {"shared_tokens": 20}, {"shared_tokens": -1}, {"new_tokens": 0}])
def test_sizes_that_make_no_trace_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ConversationSizes(**{"prompt_tokens": 20, **wrong})


def write_trace(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def record(timestamp: int, num_tokens: int, ids: list[int], new_tokens: int = 3) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": num_tokens, "output_length": new_tokens, "hash_ids": ids}


def test_a_hash_id_is_the_same_tokens_wherever_it_occurs(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", record(5000, 1100, [7, 8, 9]), record(7000, 1024, [7, 8]))
    trace = mooncake(path, 1000, speed=2, most_tokens=4000, most_requests=None)
    first, second = (request.prompt({}) for request in trace.requests)
    assert [len(first), len(second)] == [1100, 1024]
    assert first[:1024] == second
    assert [request.at_s for request in trace.requests] == [0, 1]


def test_too_long_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    records = [record(0, 5000, list(range(10))), record(1, 100, [1]), record(2, 100, [2]), record(3, 100, [3])]
    trace = mooncake(write_trace(tmp_path / "t.jsonl", *records), 1000, speed=1, most_tokens=999, most_requests=2)
    assert [request.name for request in trace.requests] == ["r2", "r3"]
    assert trace.num_skipped == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1"),
        ('{"timestamp": 0}', "input_length"),
        (json.dumps(record(0, 1000, [1])), "1 hash ids for 1000 tokens"),
        (json.dumps(record(0, 0, [])), "0 tokens"),
        ("", "no request"),
    ],
)
def test_a_file_that_is_no_trace_says_where(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        mooncake(path, 1000, speed=1, most_tokens=4000, most_requests=None)
    with pytest.raises(ConfigError, match="cannot be read"):
        mooncake(tmp_path / "none", 1000, speed=1, most_tokens=4000, most_requests=None)


def test_percentiles_of_few_values_end_with_the_greatest() -> None:
    assert percentiles([0.001, 0.002, 0.009]) == {"mean": 4.0, "p50": 2.0, "p99": 9.0}
    assert percentiles([i / 1000 for i in range(1, 1001)]) == {"mean": 500.5, "p50": 500.5, "p99": 990.0}
    assert percentiles([]) is None


def test_an_interval_is_students() -> None:
    mean, half = interval([0.9, 1.0, 1.1])
    assert mean == pytest.approx(1.0)
    assert half == pytest.approx(4.303 * 0.1 / 3**0.5)


# -- the player, against a server that answers as vLLM does ----------------------------------------------------------


class FakeServer:
    """Answers /v1/completions with a token per event, and remembers what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.open = self.most_open = 0
        self.fails = ""
        self.url = ""

    async def answer(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        self.bodies.append(body)
        if self.fails == "refuse":
            return web.Response(status=400, text="too long")
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(body["max_tokens"] - (self.fails == "break off")):
            await asyncio.sleep(0.01)
            await self._send(response, {"choices": [{"token_ids": [body["prompt"][-1] + i]}]})
        details = {"prompt_tokens_details": {"cached_tokens": 2}, "prompt_tokens": len(body["prompt"])}
        await self._send(response, {"choices": [], "usage": details})
        await response.write(b"data: [DONE]\n\n")
        self.open -= 1
        return response

    @staticmethod
    async def _send(response: Any, event: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    from aiohttp import web

    fake, loop, ready = FakeServer(), asyncio.new_event_loop(), threading.Event()

    async def start() -> Any:
        app = web.Application()
        app.router.add_post("/v1/completions", fake.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def serve() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(10)
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def test_every_request_is_served_and_timed_and_turns_wait_for_the_one_before() -> None:
    trace = conversations(SIZES, 300, seed=3)
    with fake_server() as server:
        played = play(server.url, trace, clients=2)
    assert server.most_open == 2
    assert len(played.served) == len(trace.requests)
    for one in played.served:
        prompt = one.request.prompt(played.answers)
        assert one.prompt_tokens == len(prompt)
        assert list(one.tokens) == [prompt[-1] + i for i in range(4)]
        assert one.ttft_s > 0.009
        assert len(one.gaps_s) == 3
    figures = played.figures()
    assert figures["cached_tokens"] == 2 * len(trace.requests)
    assert figures["output_tokens_per_s"] == pytest.approx(4 * 9 / played.seconds, rel=0.01)
    assert figures["ttft_later_turns_ms"]["p50"] >= 9


def test_given_answers_stand_in_the_prompts_instead_of_the_servers_own() -> None:
    trace = conversations(SIZES, 300, seed=3)
    answers = answers_of(trace)
    with fake_server() as server:
        play(server.url, trace, clients=3, answers=answers)
    wanted = [request.prompt(answers) for request in trace.requests]
    assert sorted(body["prompt"] for body in server.bodies) == sorted(wanted)


def test_timed_requests_arrive_when_they_should_whatever_the_clients() -> None:
    requests = tuple(TraceRequest(f"r{i}", (20 + i,), 5, at_s=0.0) for i in range(4))
    with fake_server() as server:
        play(server.url, Trace(requests, "burst"), clients=1)
        assert server.most_open == 4


@pytest.mark.parametrize(("fails", "says"), [("refuse", "400: too long"), ("break off", "3 tokens")])
def test_a_failed_request_ends_the_run_with_its_reason(fails: str, says: str) -> None:
    with fake_server() as server:
        server.fails = fails
        with pytest.raises(RequestFailedError, match=says):
            play(server.url, conversations(SIZES, 300, seed=3), clients=2)


def test_a_server_that_is_not_there_ends_the_run() -> None:
    with pytest.raises(RequestFailedError, match="did not answer"):
        play("http://127.0.0.1:9", conversations(SIZES, 300, seed=3), clients=2)
