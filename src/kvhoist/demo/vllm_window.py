"""One engine in a process of its own that generates when it is told to: an arm of `kvhoist.demo.vllm_throughput`.

`python -m kvhoist.demo.vllm_window SPEC`: SPEC is a WindowSpec as JSON. It answers on stdout, a JSON line each: once
when the engine stands, then for every line (a seed) that comes on stdin. What libraries print goes to stderr.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_QUIET_S = 0.1
_MOST_BUSY = 0.05
_LONGEST_DRAIN_S = 60.0
_OUR_THREADS = "kvhoist"

hooks_s = 0.0
"""CPU seconds of the engine's own thread in the connector's methods, since `time_hooks`."""


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """An engine and what it does in a window: `requests` different prompts of `prompt_tokens` at once, `new_tokens`
    each. `connector` is a kv-transfer-config, None for none."""

    model: str
    dtype: str
    device_blocks: int
    block_tokens: int
    requests: int
    prompt_tokens: int
    new_tokens: int
    connector: dict[str, Any] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def time_hooks() -> None:
    """Have every call of KvhoistConnector's methods counted in `hooks_s`. Calls within calls count once."""
    from kvhoist.adapters.vllm import KvhoistConnector

    inside = False

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            global hooks_s
            if inside:
                return method(*args, **kwargs)
            inside, began = True, time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                hooks_s += time.thread_time() - began
                inside = False

        return call

    for name, member in list(vars(KvhoistConnector).items()):
        if not name.startswith("_") and callable(member):
            setattr(KvhoistConnector, name, timed(member))


def background_s() -> float:
    """Return the CPU seconds of kvhoist's own threads so far."""
    ids = [thread.native_id for thread in threading.enumerate() if thread.name.startswith(_OUR_THREADS)]
    total_ns = 0
    for number in ids:
        with suppress(OSError):  # it has ended
            total_ns += int(Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0])
    return total_ns / 1e9


def make_engine(spec: WindowSpec) -> Any:
    """Start vLLM in this process."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if spec.connector:
        time_hooks()
    return LLM(
        spec.model,
        dtype=spec.dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=spec.block_tokens,
        num_gpu_blocks_override=spec.device_blocks,
        kv_cache_memory_bytes=1 << 30,
        max_model_len=spec.prompt_tokens + spec.new_tokens,
        max_num_seqs=spec.requests,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(**spec.connector) if spec.connector else None,
    )


def generate(engine: Any, spec: WindowSpec, seed: int) -> dict[str, float]:
    """Run one window; returns its seconds, and CPU seconds with what the window left to do: of the whole process, and
    of these in kvhoist."""
    from vllm import SamplingParams

    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    rng = random.Random(seed)
    prompts: Any = [
        {"prompt_token_ids": rng.choices(range(10, vocabulary), k=spec.prompt_tokens)} for _ in range(spec.requests)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=spec.new_tokens, ignore_eos=True, detokenize=False)
    ours_began = hooks_s + background_s()
    began, cpu_began = time.perf_counter(), time.process_time()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    drained = _drain()
    return {
        "seconds": seconds,
        "cpu_s": time.process_time() - cpu_began,
        "kvhoist_cpu_s": hooks_s + background_s() - ours_began,
        "drain_s": drained,
        "tokens": num_tokens,
        "cached_tokens": cached,
    }


def _drain() -> float:
    """Wait until this process's background threads rest, so that the next arm is not disturbed; returns how long."""
    began = time.perf_counter()
    while True:
        cpu = time.process_time()
        time.sleep(_QUIET_S)
        waited = time.perf_counter() - began
        if time.process_time() - cpu < _MOST_BUSY * _QUIET_S or waited > _LONGEST_DRAIN_S:
            return waited


def main() -> None:
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        spec = WindowSpec(**json.loads(sys.argv[1]))
        engine = make_engine(spec)
        answers.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(generate(engine, spec, int(line))) + "\n")
        engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
