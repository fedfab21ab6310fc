"""Memory, copies, registrations and kernels of the ROCm platform, on the simulated HIP runtime."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import kernel_shim
import numpy as np
import pytest
from forks import status_in_fork
from hip_simulator import NOT_SUPPORTED, device_array, in_thread
from mover_support import until

from kvhoist.copy.relayout import RelayoutParameters
from kvhoist.errors import ConfigError, DeviceError
from kvhoist.platform.base import MemoryRegion, Rects, region_of
from kvhoist.platform.rocm import RocmPlatform

# -- memory --------------------------------------------------------------------------------------------------------


def test_device_memory_knows_its_allocation_and_is_freed_with_its_owner(platform: RocmPlatform, hip: Any) -> None:
    region = platform.allocate(5000)
    assert platform.allocation_of(region.address + 4999) == region.address
    with pytest.raises(DeviceError, match="hipErrorNotFound"):
        platform.allocation_of(region.address + 5000)
    with pytest.raises(ConfigError, match="cannot address"):
        platform.view(region)
    platform.write(region, np.arange(100, dtype=np.uint8))
    assert ctypes.string_at(region.address, 100) == bytes(range(100))
    held = [region]
    del region
    in_thread(held.clear)
    assert hip.live() == {}


@pytest.mark.parametrize("batch", ["batch", "one by one", "not supported after all"])
def test_batches_copy_every_entry(platform: RocmPlatform, hip: Any, pinned: np.ndarray, batch: str) -> None:
    pinned[:] = np.random.default_rng(1).integers(0, 256, pinned.nbytes)
    registration, stream = platform.register(region_of(pinned)), platform.make_stream()
    device = device_array(platform, (pinned.nbytes,))
    if batch == "one by one":
        platform.driver.has_batch_copies = False
    elif batch == "not supported after all":
        hip.fail("hipMemcpyBatchAsync", code=NOT_SUPPORTED)
    at, lengths = np.array([0, 4096, 9000]), np.array([4096, 1, 3000])
    before = hip.calls("hipMemcpyBatchAsync")
    for _ in range(2):
        platform.copy_batch(region_of(pinned).address + at, region_of(device).address + at, lengths, stream)
    stream.synchronize()
    wanted = np.full(pinned.nbytes, 0xEE, np.uint8)
    for start, length in zip(at, lengths, strict=True):
        wanted[start : start + length] = pinned[start : start + length]
    assert (device == wanted).all()
    assert hip.calls("hipMemcpyBatchAsync") - before == {"batch": 2, "one by one": 0}.get(batch, 1)
    assert hip.last_error() == 0
    registration.close()


def test_two_dimensional_copies_leave_the_gaps_alone(platform: RocmPlatform, pinned: np.ndarray) -> None:
    pinned[:] = np.arange(pinned.nbytes) % 251
    registration, stream = platform.register(region_of(pinned)), platform.make_stream()
    device = device_array(platform, (1000,))
    numbers = [[region_of(pinned).address], [region_of(device).address], [10], [6], [100], [70]]
    platform.copy_batch_2d(Rects(*(np.array(number) for number in numbers)), stream)
    stream.synchronize()
    wanted = np.full(1000, 0xEE, np.uint8)
    for row in range(6):
        wanted[70 * row : 70 * row + 10] = pinned[100 * row : 100 * row + 10]
    assert (device == wanted).all()
    registration.close()


def test_the_device_sees_host_memory_elsewhere(platform: RocmPlatform, pinned: np.ndarray) -> None:
    pinned[7] = 42
    registration = platform.register(region_of(pinned))
    alias = registration.device_address
    assert abs(alias - region_of(pinned).address) >= pinned.nbytes
    assert ctypes.string_at(alias + 7, 1) == b"*"
    ctypes.memset(alias + 8, 9, 1)
    assert pinned[8] == 9
    registration.close()
    registration.close()
    assert (pinned[7], pinned[8]) == (42, 9)


# -- modules -------------------------------------------------------------------------------------------------------


def test_kernels_are_found_by_name_and_targets_must_fit(platform: RocmPlatform, hip: Any, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"loading a code object.*hipErrorNoBinaryForGpu \(209\)"):
        platform.load_module(hip.image_of(tmp_path / "none.so", arch="gfx90a"))
    with pytest.raises(DeviceError, match="hipErrorInvalidImage"):
        platform.load_module(b"\x7fELF")
    module = platform.load_module(hip.image)
    with pytest.raises(DeviceError, match=r"looking up the kernel relayout5.*hipErrorNotFound"):
        module.prepare("relayout5", RelayoutParameters())


def test_a_kernel_that_is_given_a_host_address_breaks_the_device(
    platform: RocmPlatform, hip: Any, pinned: np.ndarray
) -> None:
    """What the simulator is for: the address is one that this process could read."""
    registration, stream = platform.register(region_of(pinned)), platform.make_stream()
    device = platform.allocate(64)
    parameters = RelayoutParameters(num_places=1, num_steps=1, run_bytes=64)
    parameters.length[:] = [1] * len(parameters.length)
    parameters.src.per_unit = parameters.dst.per_unit = 1
    places = device_array(platform, (16,))
    places[:] = 0
    parameters.places = region_of(places).address
    call = platform.load_module(hip.image).prepare("relayout16", parameters)
    parameters.src.base, parameters.dst.base = registration.device_address, device.address
    call.launch(1, 32, stream)
    stream.synchronize()
    parameters.src.base = region_of(pinned).address
    call.launch(1, 32, stream)
    until(lambda: "a host address of registered memory" in hip.message)
    with pytest.raises(DeviceError, match=r"hipErrorIllegalAddress \(700\)"):
        stream.synchronize()
    hip.repair()
    registration.close()


def test_the_simulated_kernels_are_what_the_repository_ships(tmp_path: Path, hip: Any) -> None:
    assert kernel_shim.SOURCE.read_text() == (hip.path.parent / "relayout.cuh").read_text()


# -- registrations -------------------------------------------------------------------------------------------------


def test_what_is_no_longer_registered_is_this_process_s_alone(platform: RocmPlatform, pinned: np.ndarray) -> None:
    """The simulator's pages are shared with a forked child for as long, and the heap may go on living in them."""
    pinned[:] = 1
    platform.register(region_of(pinned)).close()
    assert (pinned == 1).all()

    def write() -> int:
        pinned[:] = 2
        return 0

    assert status_in_fork(write) == 0
    assert (pinned == 1).all()


def test_a_refused_alias_leaves_nothing_registered(platform: RocmPlatform, hip: Any, pinned: np.ndarray) -> None:
    hip.fail("hipHostGetDevicePointer", code=1)
    with pytest.raises(DeviceError, match=r"the device's address of host memory.*hipErrorInvalidValue"):
        platform.register(region_of(pinned))
    assert hip.live() == {}


@pytest.mark.parametrize(("first", "count"), [(0, 3), (1, 1), (0, 2), (2, 1)])
def test_memory_that_someone_else_registered_is_refused(
    platform: RocmPlatform, hip: Any, pinned: np.ndarray, first: int, count: int
) -> None:
    """As a whole, inside of it, or in part: an address in their registration and a range beyond it."""
    start = region_of(pinned).address
    theirs = platform.register(MemoryRegion(start + 4096 * first, 4096 * count))
    with pytest.raises(DeviceError, match=r"hipErrorHostMemoryAlreadyRegistered \(712\).*whoever registered it"):
        platform.register(MemoryRegion(start, 3 * 4096))
    assert hip.live() == {"registrations": 1}
    assert hip.last_error() == 0
    theirs.close()


@pytest.mark.parametrize(("offset", "length"), [(4096 - 16, 32), (0, 4097), (-16, 32)])
def test_a_copy_over_the_end_of_a_registration_is_refused_before_anything_moves(
    platform: RocmPlatform, pinned: np.ndarray, offset: int, length: int
) -> None:
    """The next page is registered too, on its own: no copy may span two."""
    start = region_of(pinned).address + 4096
    both = [platform.register(MemoryRegion(start + 4096 * i, 4096)) for i in range(2)]
    device, stream = device_array(platform, (8192,)), platform.make_stream()
    with pytest.raises(DeviceError, match=rf"copying {length} B.*hipErrorInvalidValue"):
        platform.copy(start + offset, region_of(device).address, length, stream)
    stream.synchronize()
    assert (device == 0xEE).all()
    for registration in both:
        registration.close()
