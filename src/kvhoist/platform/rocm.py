"""The ROCm platform: one AMD GPU."""

from __future__ import annotations

from dataclasses import replace

from kvhoist.platform.base import Capabilities, Device, MemoryRegion, Registration
from kvhoist.platform.gpu import GpuPlatform
from kvhoist.platform.rocm_driver import RocmDriver
from kvhoist.platform.rocm_host import DriverMemory, DriverMemoryRegistration
from kvhoist.settings import Settings

CAPABILITIES = Capabilities(
    engines=("staged", "dma", "mapped"),
    asynchronous=True,
    host_visible=False,
    registers_host=True,
    launches_kernels=True,
    block_quota=16,  # published for MI300X: 24 GB/s at 2, 55 at 8; others settled on 16 and 32
)
"""Of every AMD GPU; the device at hand adds its own."""


class RocmPlatform(GpuPlatform):
    """One AMD GPU. Uses the HIP runtime that the process holds. MissingDependencyError where there is none to be found,
    ConfigError where it cannot be used."""

    def __init__(self, device: Device) -> None:
        driver = RocmDriver(device.index)
        super().__init__("rocm", device, driver, replace(CAPABILITIES, gpu_arch=driver.gpu_arch))
        self._driver_memory = DriverMemory(driver)

    def allocate_host(self, num_bytes: int) -> MemoryRegion | None:
        """Return driver-owned memory where HSA_USERPTR_FOR_PAGED_MEM is 0. Raises as `DriverMemory.allocate` does."""
        return self._driver_memory.allocate(num_bytes) if Settings.from_env().driver_owned_host_memory else None

    def register(self, region: MemoryRegion) -> Registration:
        if self._driver_memory.holds(region):
            return DriverMemoryRegistration(self.driver, region)
        return super().register(region)
