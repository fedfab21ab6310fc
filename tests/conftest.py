"""What all tests share: hypothesis profiles, and an environment that no developer's settings reach."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernel_shim
import pytest
from crash_reports import pytest_configure, pytest_configure_node, pytest_handlecrashitem  # noqa: F401 - hooks
from hypothesis import HealthCheck, settings

from kvhoist.copy import device_kernels
from kvhoist.platform import open as platform_open

# Deadlines would judge a machine that runs several tests at once, not the code.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


_LONG = (
    *("test_engine_soak", "test_server_streams", "test_cluster_demo", "test_bench_acceptance"),
    *("test_old_release", "test_random_load"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes a minute, so that no worker is alone with it at the end."""
    items.sort(key=lambda item: item.path.stem not in _LONG)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVHOIST_") and name != "KVHOIST_CACHE_DIR"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVHOIST_RUNTIME_DIR", "off")


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own, named by KVHOIST_CACHE_DIR, not made yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVHOIST_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def one_core() -> Iterator[tuple[int, set[int]]]:
    """This thread bound to one core, as vLLM binds a CPU worker's, while another keeps all: that core, and all."""
    cores, ended = os.sched_getaffinity(0), threading.Event()
    if len(cores) < 2:
        pytest.skip("this process has one core")
    keeps_all = threading.Thread(target=ended.wait, daemon=True)
    keeps_all.start()
    os.sched_setaffinity(0, {min(cores)})
    yield min(cores), cores
    os.sched_setaffinity(0, cores)
    ended.set()
    keeps_all.join()


@pytest.fixture(autouse=True)
def _no_gpu_that_another_test_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has loaded the simulated HIP runtime holds it for ever; only tests with `hip` see it."""
    if "hip_simulator" in sys.modules:
        monkeypatch.setattr(platform_open, "holds_amd_gpus", lambda: False)


@pytest.fixture
def hip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The simulated HIP runtime, with kernels compiled for it. After the test nothing may be left alive in it, and no
    access may have been wrong."""
    if kernel_shim.compiler() is None:
        pytest.skip("no C++ compiler here")
    from hip_simulator import simulator

    found = simulator()
    found.repair()
    monkeypatch.setattr(platform_open, "holds_amd_gpus", lambda: True)

    class Compiled:
        image = found.image

    monkeypatch.setattr(device_kernels, "compile_kernels", lambda *_, **__: Compiled())
    yield found
    request.node.funcargs.clear()  # a platform that the test was given keeps its spare events
    gc.collect()
    message, live = found.message, found.live()
    found.repair()
    assert (message, live) == ("", {})
