"""A worker of pytest-xdist that crashes tells how it ended and where its threads were, in the report of its test."""

from __future__ import annotations

import faulthandler
import functools
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

_END_S = 30


@functools.cache
def _traces() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvhoist-crashes-")


def _trace(node: Any) -> Path:
    return Path(_traces().name) / node.gateway.id


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the controller: tell a worker where to write."""
    node.workerinput["crash_trace"] = str(_trace(node))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """In a worker: have Python write there, instead of somewhere between the dots."""
    path = getattr(config, "workerinput", {}).get("crash_trace")
    if path is not None:
        faulthandler.enable(Path(path).open("w"))  # noqa: SIM115 - open for as long as the process lives


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    """In the controller: add to the report what is known."""
    try:
        status = report.node.gateway._io.popen.wait(_END_S)
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    except subprocess.TimeoutExpired:
        how = "closing its channel: it still runs"
    trace = _trace(report.node)
    report.longrepr += f", by {how}\n{trace.read_text() if trace.exists() else ''}"
