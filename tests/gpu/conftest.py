"""Tests that need an NVIDIA GPU: skipped, with the reason, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def _why_not() -> str | None:
    torch = pytest.importorskip("torch")
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if _HERE in item.path.parents]
    reason = _why_not() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
