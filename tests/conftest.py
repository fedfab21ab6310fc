"""What all tests share: hypothesis profiles, and an environment that no developer's settings reach."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Deadlines would judge a machine that runs several tests at once, not the code.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVHOIST_") and name != "KVHOIST_CACHE_DIR"]:
        monkeypatch.delenv(name)


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own, named by KVHOIST_CACHE_DIR, not made yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVHOIST_CACHE_DIR", str(folder))
    return folder
