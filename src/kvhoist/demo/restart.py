"""The demo's second process: opens the same folder with empty device and host tiers, and answers one question.

python -m kvhoist.demo.restart < request.json > answer.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvhoist.adapters.transformers.loading import quiet_transformers
from kvhoist.demo.oracles import Recorder, greedy
from kvhoist.demo.page_cache import drop_page_cache
from kvhoist.demo.session import DemoOptions, warm_up
from kvhoist.errors import KvhoistError

_TIMEOUT_S = 600


def answer_in_new_process(options: DemoOptions, prompt: Sequence[int]) -> dict[str, Any]:
    """Start this module as a new process on the same folder, the page cache dropped for its files, and return what it
    answers (see `answer`). Raises KvhoistError, with the end of its messages, when it fails."""
    drop_page_cache(options.folder)
    request = {
        "options": {**asdict(options), "folder": str(options.folder)},
        "prompt": list(prompt),
        "threads": torch.get_num_threads(),  # another number sums in another order
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvhoist.demo.restart"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise KvhoistError("the restarted process did not answer", got=f"nothing in {_TIMEOUT_S} s") from error
    if done.returncode:
        raise KvhoistError("the restarted process failed", got=f"exit status {done.returncode}: {done.stderr[-2000:]}")
    reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reply


def answer(options: DemoOptions, prompt: Sequence[int]) -> dict[str, Any]:
    """Generate for `prompt` with the store's pages, recompute it for comparison, and return tokens, times, where the
    KV came from, and the digest of all logits and KV for oracle (a)."""
    opened_at = time.perf_counter()
    with options.open() as cached:
        warm_up(cached)
        recorder = Recorder(cached)
        ready_seconds = time.perf_counter() - opened_at
        generation = cached.generate(prompt, options.sampling)
        digest = recorder.trace(generation.tokens, generation.report.ttft_seconds).digest()
        recomputed = greedy(cached.model, prompt, options.new_tokens, end_tokens=cached.end_tokens)
        cached.cache.flush()
        cached.cache.audit()
    return {
        "pid": os.getpid(),
        "tokens": generation.tokens,
        "text": generation.text,
        "report": generation.report.to_dict(),
        "digest": digest,
        "recomputed_tokens": recomputed.tokens,
        "ttft_without_seconds": recomputed.ttft_seconds,
        "ready_seconds": ready_seconds,
    }


def main() -> None:
    quiet_transformers()
    request = json.load(sys.stdin)
    options = request["options"]
    torch.set_num_threads(request["threads"])
    found = answer(DemoOptions(**{**options, "folder": Path(options["folder"])}), request["prompt"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
