"""Three vLLM servers of the same settings under the same trace: without offloading, with vLLM's own, with kvhoist.

For whoever has a GPU and a model, and wants to know what either is worth to them. Arms run one after the other, each
with the whole machine. The first arm's answers stand in the prompts of all later turns, so that every arm serves the
same prompts; what each arm answered is compared with them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhoist.demo.child import ServerFailedError
from kvhoist.demo.vllm_load import Played, RequestFailedError, Served, play
from kvhoist.demo.vllm_machine import describe
from kvhoist.demo.vllm_server import MODEL_NAME, ServerOptions, VllmServer, kvhoist_connector
from kvhoist.demo.vllm_trace import Trace, TraceRequest
from kvhoist.errors import ConfigError, KvhoistError
from kvhoist.platform.base import Device
from kvhoist.platform.open import open_platform
from kvhoist.units import format_bytes

ARMS = ("none", "native", "kvhoist")
WHAT = {
    "none": "no offloading: vLLM's prefix cache on the device alone",
    "native": "vLLM's OffloadingConnector with its CPUOffloadingSpec",
    "kvhoist": "KvhoistConnector",
}
NATIVE_ON_CPU = "vLLM's CPUOffloadingSpec refuses the CPU platform: it copies between a GPU and host memory"
WHY_DIFFERENT = (
    "Greedy answers may differ between arms without any fault: a prefix that is loaded is not computed again, so that "
    "other batch shapes and other kernels compute the rest, and sums round otherwise; where two tokens are about "
    "equally likely, the other one is chosen, and the answer goes on from there. A share that is much lower than "
    "vLLM's own offloading has beside no offloading is a fault."
)

OnStep = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class AcceptanceOptions:
    """What is served, and how. `device_tokens` is what the device cache holds (None: vLLM decides), `host_bytes` the
    host memory of both offloading arms, `storage` kvhoist's third tier. `kvhoist` and `native` are further settings of
    their kv_connector_extra_config, `server` further arguments of every server, `on_gpu` whether there is one."""

    model: str
    logs: Path
    on_gpu: bool
    max_tokens: int
    host_bytes: int
    arms: tuple[str, ...] = ARMS
    clients: int = 8
    dtype: str = "auto"
    block_tokens: int = 16
    device_tokens: int | None = None
    storage: str | None = None
    kvhoist: dict[str, Any] = field(default_factory=dict)
    native: dict[str, Any] = field(default_factory=dict)
    server: tuple[str, ...] = ()
    ready_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        unknown = [arm for arm in self.arms if arm not in ARMS]
        if unknown or not self.arms or len(set(self.arms)) != len(self.arms):
            raise ConfigError("these are not the arms of a comparison", got=", ".join(self.arms), choices=ARMS)


@dataclass(frozen=True, slots=True)
class ArmOptions(ServerOptions):
    """A server as a user starts it. On a GPU nothing is said of CPU threads, and CUDA graphs stay on."""

    on_gpu: bool = True

    def command(self, port: int) -> list[str]:
        whole = ServerOptions.command(self, port)
        if not self.on_gpu:
            return whole
        blocks = ["--num-gpu-blocks-override", str(self.device_blocks)] if self.device_blocks else []
        connector = ["--kv-transfer-config", json.dumps(self.connector)] if self.connector else []
        return [
            *("env", "PYTHONHASHSEED=0", sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", str(port), "--model", str(self.model)),
            *("--served-model-name", MODEL_NAME, "--dtype", self.dtype, "--max-model-len", str(self.max_tokens)),
            *("--block-size", str(self.block_tokens), *blocks),
            *("--enable-prompt-tokens-details", *connector, *self.more),
        ]


@dataclass
class ArmResult:
    """One arm: what was played, or why it was not. `excused` where that is no fault of this machine or its user."""

    name: str
    played: Played | None = None
    not_run: str = ""
    excused: bool = False
    tail: str = ""
    counters: dict[str, float] = field(default_factory=dict)
    ready_s: float = 0.0


def has_gpu() -> bool:
    """Tell whether torch sees a GPU, NVIDIA's or AMD's."""
    import torch

    return bool(torch.cuda.is_available())


def run(options: AcceptanceOptions, trace: Trace, on_step: OnStep = lambda _: None) -> dict[str, Any]:
    """Run all arms and return plain data: `arms` by name with figures or `not_run`, the trace, machine and versions.

    An arm that cannot run here is left out with its reason; `pass` is False where one failed that should have run.
    """
    results = [_why_not(name, options) or ArmResult(name) for name in options.arms]
    with ExitStack() as stopped:
        servers = {one.name: VllmServer(server_of(one.name, options)) for one in results if not one.not_run}
        for server in servers.values():
            stopped.callback(server.stop)
            if not options.on_gpu:  # no device that they would have to share, and long starts
                server.start()
        for one in results:
            if one.name in servers:
                answers = next((other.played.answers for other in results if other.played is not None), None)
                _run_arm(one, servers[one.name], options, trace, answers, on_step)
            if one.not_run:
                on_step(f"{one.name}: not run: {one.not_run}")
    return _to_document(options, trace, results)


def _to_document(options: AcceptanceOptions, trace: Trace, results: list[ArmResult]) -> dict[str, Any]:
    played = [one for one in results if one.played is not None]
    return {
        "arms": {one.name: _to_dict(one, played) for one in results},
        "why_answers_may_differ": WHY_DIFFERENT,
        "trace": trace.describe(),
        "settings": {
            "model": Path(options.model).name,
            "dtype": options.dtype,
            "clients": options.clients,
            "block_tokens": options.block_tokens,
            "device_tokens": options.device_tokens,
            "host_bytes": format_bytes(options.host_bytes),
            "storage": options.storage is not None,
            "more": list(options.server),
        },
        **describe(),
        "pass": bool(played) and all(one.played is not None or one.excused for one in results),
    }


def connector_of(name: str, options: AcceptanceOptions) -> dict[str, Any] | None:
    """Return an arm's kv-transfer-config. vLLM's own keys are the same in 0.20 and 0.32, but for `offload_prompt_only`,
    which 0.20 ignores: by default 0.32 leaves generated tokens out."""
    if name == "native":
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": options.host_bytes,
                "offload_prompt_only": False,
                **options.native,
            },
        }
    if name == "kvhoist":
        storage = {} if options.storage is None else {"storage": options.storage}
        return kvhoist_connector(**{"host_bytes": options.host_bytes, **storage, **options.kvhoist})
    return None


def server_of(name: str, options: AcceptanceOptions) -> ArmOptions:
    tokens = options.device_tokens
    return ArmOptions(
        model=Path(options.model),
        log=options.logs / f"vllm-{name}.log",
        device_blocks=0 if tokens is None else 1 + -(-tokens // options.block_tokens),
        block_tokens=options.block_tokens,
        max_tokens=options.max_tokens,
        dtype=options.dtype,
        connector=connector_of(name, options),
        more=options.server,
        on_gpu=options.on_gpu,
    )


def _why_not(name: str, options: AcceptanceOptions) -> ArmResult | None:
    if name == "native" and not options.on_gpu:
        return ArmResult(name, not_run=NATIVE_ON_CPU, excused=True)
    if name == "kvhoist" and options.on_gpu:
        try:
            open_platform(Device("cuda", 0))
        except KvhoistError as error:
            reason = f"this release of kvhoist has no GPU platform yet, and refuses to start on one ({error})"
            return ArmResult(name, not_run=reason, excused=True)
    return None


def _run_arm(
    result: ArmResult,
    server: VllmServer,
    options: AcceptanceOptions,
    trace: Trace,
    answers: dict[str, tuple[int, ...]] | None,
    on_step: OnStep,
) -> None:
    """Serve the trace by one arm's server, stop it, and write down in `result` what came of it."""
    name, num_served = result.name, 0

    def served(_: Served) -> None:
        nonlocal num_served
        num_served += 1
        on_step(f"{name}: {num_served} of {len(trace.requests)} requests")

    on_step(f"{name}: starting the server")
    try:
        if options.on_gpu:
            server.start()
        server.wait_ready(options.ready_timeout_s)
        result.ready_s = server.ready_seconds
        _warm_up(server.url, trace, options.clients)
        before = server.metrics()
        result.played = play(server.url, trace, clients=options.clients, answers=answers, on_served=served)
        result.counters = _counted(before, server.metrics())
    except (ServerFailedError, RequestFailedError) as error:
        result.played = None
        result.not_run = str(error)
        result.tail = error.tail if isinstance(error, ServerFailedError) else server.log_tail()
    finally:
        server.stop()


def _warm_up(url: str, trace: Trace, clients: int) -> None:
    """Let kernels be chosen and compiled: as many requests at once as there will be, of prompts of their own."""
    first = trace.requests[0]
    others = [
        TraceRequest(f"warm-up {i}", (i + 1, *first.own[1:]), max(8, first.new_tokens // 4)) for i in range(clients)
    ]
    play(url, Trace(tuple(others), "warm-up"), clients=clients)


_COUNTERS = re.compile(r"vllm:kvhoist_\w+|vllm:(external_)?prefix_cache_(hits|queries)\w*|vllm:num_preemptions\w*")


def _counted(before: Any, after: Any) -> dict[str, float]:
    """Return what the server's counters of caching grew by, with their labels."""
    start = {(name, tuple(sorted(labels.items()))): value for name, labels, value in before.samples}
    grown: dict[str, float] = {}
    for name, labels, value in after.samples:
        if not _COUNTERS.fullmatch(name) or name.endswith("_created"):
            continue
        more = value - start.get((name, tuple(sorted(labels.items()))), 0.0)
        told = ",".join(v for k, v in sorted(labels.items()) if k not in ("engine", "model_name"))
        if more:
            grown[f"{name}{{{told}}}" if told else name] = round(more, 3)
    return grown


def _to_dict(one: ArmResult, played: Sequence[ArmResult]) -> dict[str, Any]:
    if one.played is None:
        return {"what": WHAT[one.name], "not_run": one.not_run, "log_tail": one.tail.splitlines()}
    first = played[0].played
    assert first is not None
    wanted = first.answers
    same = sum(tokens == wanted[name] for name, tokens in one.played.answers.items())
    base, figures = first.figures(), one.played.figures()
    return {
        "what": WHAT[one.name],
        **figures,
        "throughput_ratio": round(figures["output_tokens_per_s"] / base["output_tokens_per_s"], 3),
        "answers_as_first_arm": round(same / len(wanted), 4),
        "ready_s": round(one.ready_s, 1),
        "counters": one.counters,
    }
