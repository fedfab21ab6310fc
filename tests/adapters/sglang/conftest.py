"""Tests of the SGLang adapter, on the HiCache classes of SGLang's wheel (tests/sglang_standin.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import sglang_standin

READY = sglang_standin.sources() is not None and find_spec("msgspec") is not None
if READY:
    sglang_standin.install()
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    return None if READY else "no sources of SGLang: scripts/test brings them; tests/adapters/sglang is left out"


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> sglang_standin.Engine:
    """What SGLang says of itself, fresh for each test."""
    for name, value in vars(sglang_standin.Engine()).items():
        monkeypatch.setattr(sglang_standin.engine, name, value)
    return sglang_standin.engine


@pytest.fixture
def checkpoint(tmp_path: Path, engine: sglang_standin.Engine) -> Path:
    """The folder of a model, which the engine serves."""
    from sglang_rig import write_checkpoint

    engine.model.model_path = str(write_checkpoint(tmp_path / "model"))
    return tmp_path / "model"


@pytest.fixture
def backend(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Create backends by SGLang's own factory, on one folder unless `storage` says otherwise; closed at the end."""
    from sglang_rig import create_backend

    opened: list[Any] = []

    def make(pool: Any, options: dict[str, Any] | None = None, **config: Any) -> Any:
        opened.append(create_backend(pool, {"storage": f"file:{tmp_path}/store", **(options or {})}, **config))
        return opened[-1]

    yield make
    for each in opened:
        each.close()
