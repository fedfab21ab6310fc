"""A vLLM OpenAI server as a child process: started, watched until it answers, asked for its counters, stopped whole."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvhoist.demo.signals import signals_held
from kvhoist.errors import KvhoistError

MODEL_NAME = "demo"
"""What requests call the served model."""

_TAIL_LINES = 25
_ENOUGH_BYTES = str(1 << 30)
"""Said to be there for blocks, so that vLLM does not measure the machine; how many are made the blocks' number says."""
_LOG_PREFIX = re.compile(r"^\(.*? pid=\d+\) (?:\w+ [^\]]*\] ?)?")
_ERROR = re.compile(r"kvhoist cannot start: |[\w.]+(?:Error|Exception): ")
_DETAIL_LINES = 3
_READY_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 30.0
_HELPERS_TIMEOUT_S = 10.0
_POLL_S = 0.1
_PORTS = range(20000, 32768)
"""Below those that Linux gives to outgoing connections and to whoever asks for any."""


class ServerFailedError(KvhoistError):
    """The server ended, or did not answer in time. `tail` holds the last lines of its log."""

    def __init__(self, what: str, *, tail: str = "", **parts: Any) -> None:
        super().__init__(what, **parts)
        self.tail = tail


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

    def command(self, port: int) -> list[str]:
        """Return the command line, environment first: what a person could type."""
        connector = ["--kv-transfer-config", json.dumps(self.connector)] if self.connector else []
        variables = {**_base_environment(), **self.environment}
        return [
            *("env", *(f"{name}={value}" for name, value in variables.items())),
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", str(port), "--model", str(self.model)),
            *("--served-model-name", MODEL_NAME, "--dtype", self.dtype),
            *("--enforce-eager", "--max-model-len", str(self.max_tokens), "--block-size", str(self.block_tokens)),
            *("--num-gpu-blocks-override", str(self.device_blocks), "--kv-cache-memory-bytes", _ENOUGH_BYTES),
            *("--enable-prompt-tokens-details", *connector, *self.more),
        ]


def kvhoist_connector(**settings: Any) -> dict[str, Any]:
    """Return the kv-transfer-config that turns kvhoist on with these settings."""
    return {
        "kv_connector": "KvhoistConnector",
        "kv_connector_module_path": "kvhoist.adapters.vllm",
        "kv_role": "kv_both",
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


class VllmServer:
    """A server process in a session of its own, so that a terminal's Ctrl-C reaches us alone and we stop it.

    Use it as a context manager: entering waits until it answers, leaving ends every process of it.
    Raises ServerFailedError where it does not come up.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self.ready_seconds = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process without waiting for it. Its messages go to `options.log`, from an empty file on."""
        self.options.log.parent.mkdir(parents=True, exist_ok=True)
        self._started_at = time.perf_counter()
        with self.options.log.open("wb") as log, signals_held():
            self._process = subprocess.Popen(
                self.options.command(self.port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float = _READY_TIMEOUT_S) -> None:
        """Wait until the server answers, `timeout_s` since its start at most."""
        assert self._process is not None
        while not self._answers():
            status = self._process.poll()
            if status is not None:
                raise self._failed("the vLLM server ended before it was ready", f"exit status {status}")
            if time.perf_counter() - self._started_at > timeout_s:
                raise self._failed("the vLLM server did not become ready", f"no answer in {timeout_s:.0f} s")
            time.sleep(_POLL_S)
        self.ready_seconds = time.perf_counter() - self._started_at

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
                raise self._failed("the server's counters did not come to what they must be", f"{timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """End the server: SIGTERM, and what is left of it after `timeout_s` is killed. Idempotent.

        Its helpers (the tracker of shared memory, workers) are given a moment longer than itself, to clean up.
        """
        process, self._process = self._process, None
        if process is None:
            return
        try:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
                deadline = time.monotonic() + _HELPERS_TIMEOUT_S
                while _lives(process.pid) and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def log_tail(self) -> str:
        """Return the lines of the server's log that name an error, or where none does, its last ones."""
        with suppress(OSError):
            lines = self.options.log.read_text(errors="replace").splitlines()
            return "\n".join((_errors(lines) or lines)[-_TAIL_LINES:])
        return ""

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _failed(self, what: str, got: str) -> ServerFailedError:
        remedy = f"Its messages are in {self.options.log}."
        error = ServerFailedError(what, got=got, remedy=remedy, tail=self.log_tail())
        error.add_note(error.tail)
        return error


def _errors(lines: Sequence[str]) -> list[str]:
    """Return what a log says of errors, each once: the line that names it, and the indented ones below it."""
    found: dict[str, None] = {}
    details = 0
    for line in lines:
        text = _LOG_PREFIX.sub("", line)
        details = _DETAIL_LINES if _ERROR.match(text) else max(0, details - 1) if text.startswith(" ") else 0
        if details:
            found[text] = None
    return list(found)


def _lives(group: int) -> bool:
    """Tell whether a process of this process group runs. A zombie does not: nobody here can reap another's child."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            state, _parent, found = stat.read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state != "Z":
                return True
    return False


def _free_port() -> int:
    """Return a free port that likely stays so until the server gets to it: the system hands out none of these."""
    ports = random.SystemRandom().sample(_PORTS, 100)
    for port in ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise KvhoistError("no free port on 127.0.0.1", got=f"100 tries in {_PORTS.start} to {_PORTS.stop - 1}")
