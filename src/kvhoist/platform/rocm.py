"""The ROCm platform: one AMD GPU."""

from __future__ import annotations

from dataclasses import replace

from kvhoist.platform.base import Capabilities, Device
from kvhoist.platform.gpu import GpuPlatform
from kvhoist.platform.rocm_driver import RocmDriver

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
