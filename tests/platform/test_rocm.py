"""The ROCm platform keeps the protocol's promises, on the simulated HIP runtime."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from device_rank import DEADLINE_S
from hip_simulator import in_thread

from kvhoist.errors import ConfigError, DeviceError, MissingDependencyError
from kvhoist.platform import rocm_driver, rocm_library
from kvhoist.platform.base import Device, Priority
from kvhoist.platform.gpu_streams import GpuEvent
from kvhoist.platform.open import open_platform
from kvhoist.platform.rocm import RocmPlatform

DEVICE = Device("cuda", 0)


# -- which runtime -------------------------------------------------------------------------------------------------


def test_a_process_that_holds_a_hip_runtime_has_amds_gpus(hip: Any) -> None:
    platform = open_platform(DEVICE)
    assert (platform.name, platform.device) == ("rocm", DEVICE)
    capabilities = platform.capabilities
    assert (capabilities.gpu_arch, capabilities.compute_capability) == ("gfx942", None)
    assert (capabilities.block_quota, capabilities.multiprocessors, capabilities.max_pitch_bytes) == (16, 4, 1 << 20)
    assert platform.driver.name == "simulated GPU 0"  # type: ignore[attr-defined]


def test_the_environment_decides_where_it_says_something(hip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhoist.platform.open.holds_amd_gpus", lambda: False)
    monkeypatch.setenv("KVHOIST_PLATFORM", "rocm")
    assert open_platform(DEVICE).name == "rocm"
    monkeypatch.undo()
    monkeypatch.setenv("KVHOIST_PLATFORM", "cuda")
    if not Path("/dev/nvidiactl").exists():
        with pytest.raises(ConfigError, match="no NVIDIA driver"):
            open_platform(DEVICE)


def test_a_hip_runtime_beside_torch_for_nvidia_is_somebody_elses(hip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX loads one where it finds one."""
    plain = [line for line in rocm_library._mapped() if "libtorch_cuda" not in line]
    monkeypatch.setattr(rocm_library, "_mapped", lambda: plain)
    assert rocm_library.holds_amd_gpus()
    torch = "7f00-7f01 r-xp 0 00:00 0 /env/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so"
    monkeypatch.setattr(rocm_library, "_mapped", lambda: [*plain, torch])
    assert not rocm_library.holds_amd_gpus()


def test_the_runtime_that_the_process_holds_is_the_one_that_is_bound(hip: Any) -> None:
    assert rocm_library.loaded_hip() == (os.path.realpath(hip.path),)
    assert rocm_library.load_hip()._handle == hip.library._handle


def test_several_runtimes_in_one_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocm_library, "loaded_hip", lambda: ("/a/libamdhip64.so.7", "/b/libamdhip64.so.6"))
    with pytest.raises(ConfigError, match=r"several HIP runtimes.*/a/libamdhip64.so.7, /b/libamdhip64.so.6"):
        rocm_library.load_hip()


def test_a_missing_runtime_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocm_library, "loaded_hip", lambda: ())
    monkeypatch.setattr(rocm_library, "_SONAMES", ("libamdhip64-of-nobody.so.7",))
    with pytest.raises(MissingDependencyError, match=r"HIP runtime.*libamdhip64-of-nobody.*torch for ROCm"):
        rocm_library.load_hip()


@pytest.mark.parametrize("where", ["torch/lib", "_rocm_sdk_core/lib", "opt/lib"])
def test_a_runtime_that_nobody_has_loaded_is_found_in_wheels_and_installations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A file that is no library: the loader names it, and so shows that it was asked for it."""
    (tmp_path / where).mkdir(parents=True)
    (tmp_path / where / "libamdhip64-of-nobody.so.7").write_text("no library")
    (tmp_path / "torch").mkdir(exist_ok=True)
    (tmp_path / "torch/__init__.py").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "opt"))
    monkeypatch.setattr(rocm_library, "loaded_hip", lambda: ())
    monkeypatch.setattr(rocm_library, "_SONAMES", ("libamdhip64-of-nobody.so.7",))
    with pytest.raises(
        MissingDependencyError, match=rf"{where}/libamdhip64-of-nobody.so.7: (invalid ELF|file too short)"
    ):
        rocm_library.load_hip()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("7f-80 r-xp 00 08:01 5  /opt/rocm/lib/libamdhip64.so.7.1.70101", ["/opt/rocm/lib/libamdhip64.so.7.1.70101"]),
        ("7f-80 r-xp 00 08:01 5  /venv/torch/lib/libamdhip64.so", ["/venv/torch/lib/libamdhip64.so"]),
        ("7f-80 r-xp 00 08:01 5  /venv/x.libs/libamdhip64-1a2b3c.so.6", ["/venv/x.libs/libamdhip64-1a2b3c.so.6"]),
        ("7f-80 r-xp 00 08:01 5  /venv/torch/lib/libtorch_hip.so", []),
        ("7f-80 r-xp 00 08:01 5  /tmp/libamdhip64.so.txt", []),
    ],
)
def test_runtimes_are_found_by_their_files(line: str, found: list[str]) -> None:
    assert rocm_library._MAPPED.findall(line) == found


def test_a_runtime_without_a_call_is_too_old(hip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rocm_driver._FUNCTIONS, "register", "hipHostRegisterOfLater")
    with pytest.raises(ConfigError, match=r"HIP runtime is too old.*hipHostRegisterOfLater.*ROCm 6"):
        RocmPlatform(DEVICE)


@pytest.mark.parametrize("name", ["", "sm_90"])
def test_a_device_that_names_no_target_is_refused(hip: Any, name: str) -> None:
    hip.set_arch(name)
    with pytest.raises(ConfigError, match="names no target"):
        RocmPlatform(DEVICE)


def test_a_device_that_is_not_there_is_refused_by_hips_name_for_it(hip: Any) -> None:
    with pytest.raises(DeviceError, match=r"HIP failed in finding device 7.*hipErrorInvalidDevice \(101\)"):
        RocmPlatform(Device("cuda", 7))
    assert hip.last_error() == 0


# -- the thread's device -------------------------------------------------------------------------------------------


def test_a_thread_works_on_the_device_only_as_long_as_it_must(hip: Any) -> None:
    current = ctypes.c_int()

    def device() -> int:
        hip.library.hipGetDevice(ctypes.byref(current))
        return current.value

    def work() -> None:
        platform = RocmPlatform(Device("cuda", 1))
        assert device() == 0
        stream = platform.make_stream(Priority.HIGH)
        event = platform.record(stream)
        assert event.wait(DEADLINE_S)
        with platform.current():
            assert device() == 1
            with platform.current():
                assert device() == 1
            assert device() == 1
        assert device() == 0
        platform.enter_thread()
        assert device() == 1

    in_thread(work)


# -- events and errors ---------------------------------------------------------------------------------------------


def test_an_event_has_not_happened_before_the_work_in_front_of_it(platform: RocmPlatform, hip: Any) -> None:
    stream, gate = platform.make_stream(), threading.Event()
    hip.enqueue(stream, lambda: gate.wait(DEADLINE_S))
    event = platform.record(stream)
    assert not event.query()
    assert not event.wait(0.01)
    assert hip.last_error() == 0, "torch would take `not ready` for an error of its own"
    gate.set()
    assert event.wait(DEADLINE_S)
    assert event.query()


def test_who_waits_for_an_event_waits_for_where_it_was(platform: RocmPlatform, hip: Any) -> None:
    first, second, gate, seen = platform.make_stream(), platform.make_stream(), threading.Event(), []
    event = platform.make_event()
    assert event.query()
    hip.enqueue(first, lambda: seen.append("first"))
    first.record(event)
    second.wait(event)
    hip.enqueue(second, lambda: seen.append("second"))
    hip.enqueue(first, lambda: gate.wait(DEADLINE_S))
    first.record(event)
    second.synchronize()
    assert seen == ["first", "second"]
    assert not event.query()
    gate.set()
    first.synchronize()


def test_event_handles_are_used_again(platform: RocmPlatform, hip: Any) -> None:
    handles = {platform.make_event().handle for _ in range(10)}  # type: ignore[attr-defined]
    assert len(handles) == 1
    held = [platform.make_event() for _ in range(3)]
    assert all(isinstance(event, GpuEvent) for event in held)
    assert hip.live()["events"] == 3


def test_an_error_says_what_was_being_done_and_is_left_to_nobody_else(platform: RocmPlatform, hip: Any) -> None:
    hip.fail("hipMalloc")
    with pytest.raises(DeviceError, match=r"HIP failed in allocating 64 B.*hipErrorOutOfMemory \(2\): out of memory"):
        platform.allocate(64)
    assert hip.last_error() == 0
