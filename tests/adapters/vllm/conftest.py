"""Tests of the vLLM adapter, for machines that have vLLM."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    return "vllm is not installed: tests/adapters/vllm is left out" if find_spec("vllm") is None else None
