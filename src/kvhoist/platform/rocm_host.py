"""Host memory that AMD's driver owns (GTT), whose pages the kernel cannot migrate.

When it migrates pages of registered memory (NUMA balancing, compaction), the driver evicts every queue of the GPU until
they are mapped anew: 64 s for a pool of 180 GB, published for MI300X with ROCm 7.2. `hipHostMalloc` gives such memory
only to a process in which HSA_USERPTR_FOR_PAGED_MEM was 0 before the runtime started.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import weakref
from ctypes import byref, c_void_p
from pathlib import Path

from kvhoist.errors import ConfigError, HostMemoryError
from kvhoist.platform.base import CPU, MemoryRegion
from kvhoist.platform.gpu_driver import HOST_REGISTER_DEVICEMAP, HOST_REGISTER_PORTABLE, GpuDriver
from kvhoist.platform.page_moves import page_nodes
from kvhoist.units import format_bytes

_log = logging.getLogger(__name__)

_UNSET = "unset HSA_USERPTR_FOR_PAGED_MEM for memory whose pages may move"


class _Owner:
    __slots__ = ("__weakref__",)


class DriverMemory:
    """The driver-owned host memory of one device. Thread-safe."""

    def __init__(self, driver: GpuDriver) -> None:
        self._driver = driver
        self._ends: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> MemoryRegion:
        """Return exactly `num_bytes` bytes, given back with the region's `owner`: the last view of them.

        Raises HostMemoryError where the driver has no room, ConfigError where the pages that it gave could move.
        """
        address = c_void_p()
        flags = HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP
        with self._driver.current():
            code = self._driver.call.host_allocate(byref(address), num_bytes, flags)
        if code:
            self._driver.forget_error()
            raise HostMemoryError(
                "the driver has no room for the host tier in memory of its own (GTT), which all ranks of a node share",
                got=f"{self._driver.error_name(code)} for {num_bytes} bytes ({format_bytes(num_bytes)})",
                expected=f"at most {_gtt_total()}, less what others hold",
                remedy=f"Lower host_bytes, or {_UNSET}.",
            )
        start = int(address.value or 0)
        owner = _Owner()
        self._ends[start] = start + num_bytes
        weakref.finalize(owner, _free, self._driver, self._ends, start)
        ctypes.memset(start, 0, 1)  # a page that nobody has touched is nowhere
        if may_move(start):
            raise ConfigError(
                "HSA_USERPTR_FOR_PAGED_MEM was set after the HIP runtime had started: pages of host memory could move",
                expected="HSA_USERPTR_FOR_PAGED_MEM=0 in the environment in which the process starts",
                remedy=f"Set it there, or {_UNSET}.",
            )
        _log.info("%s of host memory are the driver's; huge pages are its matter too", format_bytes(num_bytes))
        return MemoryRegion(start, num_bytes, CPU, owner)

    def holds(self, region: MemoryRegion) -> bool:
        return any(start <= region.address and region.end <= end for start, end in list(self._ends.items()))


class DriverMemoryRegistration:
    """A part of memory that the driver has mapped for the device already: never registered or unregistered."""

    def __init__(self, driver: GpuDriver, region: MemoryRegion) -> None:
        pointer = c_void_p()
        self.region = region
        with driver.current():
            code = driver.call.host_address(byref(pointer), region.address, 0)
            driver.check(code, "asking for the device's address of host memory")
        self.device_address = int(pointer.value or 0)

    def close(self) -> None:
        return


def may_move(address: int) -> bool:
    """Tell whether the kernel could migrate the page at `address`: it cannot tell the node of one that it does not own.
    False, with a warning, where it is not asked."""
    try:
        return page_nodes([address]) != [-errno.EFAULT]
    except OSError as error:
        _log.warning("whether pages of host memory can move is unknown: move_pages answers %s", error)
        return False


def _free(driver: GpuDriver, ends: dict[int, int], start: int) -> None:
    del ends[start]
    driver.release("host_free", start)


def _gtt_total(root: Path = Path("/sys/class/drm")) -> str:
    for path in sorted(root.glob("card*/device/mem_info_gtt_total")):
        try:
            return f"{format_bytes(int(path.read_text()))} ({path})"
        except (OSError, ValueError):
            continue
    return f"what mem_info_gtt_total in {root} says"
