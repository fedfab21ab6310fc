"""A vLLM OpenAI server as a child process: what it serves, and its counters."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhoist.demo.child import POLL_S, ChildProcess, free_port

MODEL_NAME = "demo"
"""What requests call the served model."""

_ENOUGH_BYTES = str(1 << 30)
"""Said to be there for blocks, so that vLLM does not measure the machine; how many are made the blocks' number says."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a server serves: `device_blocks` blocks of `block_tokens` tokens, requests up to `max_tokens` long; with
    `connector`, a kv-transfer-config. `more` are further arguments of vLLM's. `environment` is added to this one's."""

    model: Path
    log: Path
    device_blocks: int
    block_tokens: int = 32
    max_tokens: int = 2496
    dtype: str = "bfloat16"
    connector: Mapping[str, Any] | None = None
    more: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"

    def command(self, port: int) -> list[str]:
        """Return the command line, environment first: what a person could type."""
        connector = ["--kv-transfer-config", json.dumps(self.connector)] if self.connector else []
        variables = {**_base_environment(), **self.environment}
        return [
            *("env", *(f"{name}={value}" for name, value in variables.items())),
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", self.host, "--port", str(port), "--model", str(self.model)),
            *("--served-model-name", MODEL_NAME, "--dtype", self.dtype),
            *("--enforce-eager", "--max-model-len", str(self.max_tokens), "--block-size", str(self.block_tokens)),
            *("--num-gpu-blocks-override", str(self.device_blocks), "--kv-cache-memory-bytes", _ENOUGH_BYTES),
            *("--enable-prompt-tokens-details", *connector, *self.more),
        ]


def kvhoist_connector(*, role: str = "kv_both", **settings: Any) -> dict[str, Any]:
    """Return the kv-transfer-config that turns kvhoist on with these settings."""
    return {
        "kv_connector": "KvhoistConnector",
        "kv_connector_module_path": "kvhoist.adapters.vllm",
        "kv_role": role,
        "kv_connector_extra_config": settings,
    }


def _base_environment() -> dict[str, str]:
    """All cores for each server alike: on the CPU backend another number of threads gives other bf16 sums, and a
    connector takes one away unless the cores are named. PYTHONHASHSEED: block hashes that outlive a restart in 0.20."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONHASHSEED": "0",
    }


@dataclass(frozen=True, slots=True)
class Metrics:
    """One reading of a server's /metrics."""

    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over all samples called `name` that have these labels, 0 where there is none."""
        return sum(value for found, has, value in self.samples if found == name and labels.items() <= dict(has).items())


class VllmServer(ChildProcess):
    """A server process. See ChildProcess; entering it waits until the server answers."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.port = free_port(options.host)
        super().__init__("the vLLM server", options.command(self.port), options.log, self._is_healthy)

    @property
    def url(self) -> str:
        return f"http://{self.options.host}:{self.port}"

    def metrics(self) -> Metrics:
        """Read the server's counters."""
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        families = text_string_to_metric_families(text)
        return Metrics(tuple((s.name, dict(s.labels), s.value) for family in families for s in family.samples))

    def metrics_when(self, reached: Callable[[Metrics], bool], timeout_s: float = 30.0) -> Metrics:
        """Read the counters until they have `reached` something: a step's are published a moment after its tokens.

        Raises ServerFailedError where that does not come.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.metrics()
            if reached(found):
                return found
            if time.monotonic() > deadline:
                raise self.failed("the server's counters did not come to what they must be", f"{timeout_s:.0f} s")
            time.sleep(POLL_S)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def started(options: ServerOptions, servers: list[ChildProcess]) -> VllmServer:
    """Start a server, noted in `servers` first, so that whoever stops those stops it."""
    server = VllmServer(options)
    servers.append(server)
    server.start()
    return server
