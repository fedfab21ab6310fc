"""The CPU platform keeps the protocol's promises."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvhoist.errors import ConfigError
from kvhoist.platform.base import CPU, Device, MemoryRegion, Platform, Priority, region_of, regions_of
from kvhoist.platform.cpu import CpuEvent, CpuPlatform
from kvhoist.platform.open import open_platform


def test_the_platform_of_the_cpu_is_found_and_others_are_refused() -> None:
    platform: Platform = open_platform()
    assert platform.name == "cpu"
    assert platform.capabilities.engines == ("reference",)
    assert not platform.capabilities.asynchronous
    with pytest.raises(ConfigError, match="xpu:1"):
        open_platform(Device("xpu", 1))


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is an NVIDIA GPU here")
def test_cuda_without_a_driver_is_refused_with_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        open_platform(Device("cuda", 0))


def test_recorded_work_is_done() -> None:
    platform = CpuPlatform()
    stream = platform.make_stream(Priority.HIGH)
    assert stream.priority is Priority.HIGH
    event = platform.record(stream)
    assert event.query()
    assert event.wait(0)
    stream.wait(event)
    stream.synchronize()


def test_a_stream_waits_for_a_slow_producer() -> None:
    produced = CpuEvent()
    order: list[str] = []

    def consume() -> None:
        CpuPlatform().make_stream().wait(produced)
        order.append("consumed")

    thread = threading.Thread(target=consume)
    thread.start()
    assert not produced.query()
    assert not produced.wait(0.01)
    order.append("produced")
    produced.set()
    thread.join(10)
    assert order == ["produced", "consumed"]


def test_stream_handles_other_than_the_default_are_refused() -> None:
    assert CpuPlatform().wrap_stream(0).priority is Priority.NORMAL
    with pytest.raises(ConfigError, match="handles"):
        CpuPlatform().wrap_stream(12345)


def test_a_view_is_the_memory_and_keeps_it_alive() -> None:
    array = np.arange(32, dtype=np.uint8)
    region = region_of(array)
    view = CpuPlatform().view(MemoryRegion(region.address + 8, 4, owner=array))
    del array, region
    assert view.tolist() == [8, 9, 10, 11]
    view[:] = 0
    assert not view.any()


def test_registered_host_memory_is_where_it_is() -> None:
    region = region_of(np.zeros(8, np.uint8))
    registration = CpuPlatform().register(region)
    assert registration.device_address == region.address
    assert registration.region.end == region.address + 8
    registration.close()
    registration.close()


@pytest.mark.parametrize("call", ["view", "register"])
def test_memory_of_a_gpu_is_refused(call: str) -> None:
    with pytest.raises(ConfigError, match="cuda:0"):
        getattr(CpuPlatform(), call)(MemoryRegion(1 << 40, 64, Device("cuda", 0)))


def test_a_batch_copies_each_entry_and_nothing_else() -> None:
    platform = CpuPlatform()
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 256, 64, dtype=np.uint8), np.zeros(64, np.uint8)
    a, b = regions_of([src, dst])
    starts = np.array([0, 40, 16], np.int64)
    counts = np.array([8, 5, 0], np.int64)
    expected = dst.copy()
    expected[10:18], expected[30:35] = src[0:8], src[40:45]
    stream = platform.make_stream()
    platform.copy_batch(a.address + starts, b.address + np.array([10, 30, 50], np.int64), counts, stream)
    assert (dst == expected).all()


@pytest.mark.parametrize("counts", [[1], [1, -1]])
def test_a_batch_that_does_not_fit_together_is_refused(counts: Any) -> None:
    ids = np.zeros(2, np.int64)
    with pytest.raises(ConfigError, match="do not fit together"):
        CpuPlatform().copy_batch(ids, ids, np.array(counts, np.int64), CpuPlatform().make_stream())


def test_kernels_are_refused() -> None:
    with pytest.raises(ConfigError, match="launches_kernels"):
        CpuPlatform().load_module(b"code")


def test_devices_print_as_torch_prints_them() -> None:
    assert [str(CPU), str(Device("cuda", 3))] == ["cpu", "cuda:3"]
