"""The OpenAI server with kvhoist: many streams, hang-ups, a restart, and processes that are killed."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_models import PAGE_TOKENS, engine, prompt_of, write_tiny_llama
from vllm_servers import (
    gone,
    named,
    need_packaged_model,
    processes_of,
    shared_memory,
    stream_all,
    wait_until,
    write_tiny_chat_model,
)

from kvhoist.demo.fast_dtype import fast_dtype
from kvhoist.demo.vllm_server import ServerOptions, VllmServer, kvhoist_connector

NUM_CHATS = 16
HANG_UP = (1, 4, 6, 9, 11, 14)
_SYSTEM = (
    "You answer the visitors of a lighthouse museum in one short sentence, in a friendly voice, and you never hurry. "
)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The servers' temporary folder. Its path is short: vLLM makes sockets there, whose paths have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="kvh") as folder:
        yield Path(folder)


def _options(model: Path, tmp_path: Path, temporary: Path, name: str, **more: Any) -> ServerOptions:
    settings = {"host_bytes": "512MiB", "storage": f"file:{tmp_path / 'kv'}", "debug_verify": True}
    return ServerOptions(
        model=model,
        log=tmp_path / f"{name}.log",
        connector=kvhoist_connector(**settings),
        environment={"TMPDIR": str(temporary)},
        **{"device_blocks": 48, "max_tokens": 1024, **more},
    )


def _chats() -> list[list[dict[str, str]]]:
    questions = [
        f"Visitor {i} of {i * i + 3} asks: how many steps has the tower, and who lit it? " for i in range(NUM_CHATS)
    ]
    return [[{"role": "user", "content": _SYSTEM * (1 + i % 3) + question * 3}] for i, question in enumerate(questions)]


def _left(folder: Path) -> list[Path]:
    """Return what a server left in its temporary folder, less what vLLM itself leaves there: sockets, and the file by
    which its ranks found each other."""
    return [path for path in folder.rglob("*") if not path.is_socket() and not path.name.startswith("vllm_dist_")]


@pytest.mark.timeout(600)
def test_streams_and_hang_ups_leave_the_books_right_and_a_restart_finds_their_pages(
    tmp_path: Path, temporary: Path
) -> None:
    model, dtype = need_packaged_model(), fast_dtype()
    chats = _chats()
    with VllmServer(_options(model, tmp_path, temporary, "first", dtype=dtype)) as server:
        processes = processes_of(server)
        answers = stream_all(server, chats, 4)
        shared = shared_memory(processes)
        assert all(answer.finished and answer.text for answer in answers)
        for chat, answer in zip(chats, answers, strict=True):
            chat += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And who painted it?"}]
        again = stream_all(server, chats, 24, hang_up=HANG_UP)
        assert [answer.finished for answer in again] == [i not in HANG_UP for i in range(NUM_CHATS)]
        for before, after in zip(answers, again, strict=True):
            # Whole pages of a first prompt begin the second, and some tier has them, whoever came first.
            assert not after.finished or after.cached_tokens >= before.prompt_tokens // PAGE_TOKENS * PAGE_TOKENS
        idle = server.metrics_when(
            lambda m: m.total("vllm:num_requests_running") + m.total("vllm:num_requests_waiting") == 0
        )
        assert idle.total("vllm:generation_tokens_total") < NUM_CHATS * (4 + 24) - len(HANG_UP)
        (last,) = stream_all(server, chats[:1], 8)
        assert last.cached_tokens > 0
        found = server.metrics()
        assert found.total("vllm:kvhoist_hit_tokens_total", tier="host") > 0
        for name in ("mismatched_pages", "audit_failures"):
            assert found.total(f"vllm:kvhoist_{name}_total") == 0
        assert found.total("vllm:kvhoist_failed_pages_total", kind="load") == 0
    wait_until(lambda: gone(processes), "the server has ended")
    assert not any(path.exists() for path in shared)
    assert _left(temporary) == []

    with VllmServer(_options(model, tmp_path, temporary, "second", dtype=dtype)) as server:
        (reply,) = stream_all(server, chats[2:3], 8)
        assert reply.cached_tokens > 100
        stored = server.metrics_when(lambda m: m.total("vllm:kvhoist_hit_tokens_total", tier="storage") > 0)
        assert stored.total("vllm:kvhoist_hit_tokens_total", tier="storage") == reply.cached_tokens
        assert stored.total("vllm:kvhoist_mismatched_pages_total") == 0


@pytest.mark.timeout(300)
def test_another_model_on_the_folder_says_so_once_and_a_killed_worker_leaves_nothing(
    tmp_path: Path, temporary: Path
) -> None:
    with engine(
        write_tiny_llama(tmp_path / "other"), {"host_bytes": "4MiB", "storage": f"file:{tmp_path / 'kv'}"}
    ) as one:
        one.ask(prompt_of(200))
    model = write_tiny_chat_model(tmp_path / "model", seed=2)
    options = _options(model, tmp_path, temporary, "server", dtype="float32")
    with VllmServer(options) as server:
        processes = processes_of(server)
        (answer,) = stream_all(server, _chats()[:1], 8)
        assert (answer.finished, answer.cached_tokens) == (True, 0)
        shared = shared_memory(processes)
        named(processes, "VLLM::Worker").send_signal(signal.SIGKILL)
        wait_until(lambda: gone(processes), "the server ends when its worker was killed")
    assert options.log.read_text().count("the store holds pages of other namespaces only") == 1
    assert not any(path.exists() for path in shared)
    assert _left(temporary) == []
