"""Tests of the vLLM adapter, for machines that have vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    return "vllm is not installed: tests/adapters/vllm is left out" if find_spec("vllm") is None else None


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the simulated model, for vllm_harness.SimEngine."""
    from vllm_harness_model import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("sim") / "model")


@pytest.fixture
def sim(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Start SimEngines with kvhoist. At the test's end each that is still open is run dry, checked and closed."""
    from vllm_harness import SimEngine
    from vllm_harness_kvhoist import ended, host_bytes

    monkeypatch.setenv("PYTHONHASHSEED", "0")  # so that 0.20's block hashes last, as 0.32's do
    with ExitStack() as stack:

        def start(extra: dict[str, Any] | None = None, *, pages: int = 64, **options: Any) -> Any:
            ranks = options.get("tp", 1) * options.get("pp", 1)
            settings = {"host_bytes": host_bytes(pages, ranks), "blocks_per_page": 2, **(extra or {})}
            return stack.enter_context(ended(SimEngine(checkpoint, settings, **options)))

        yield start
