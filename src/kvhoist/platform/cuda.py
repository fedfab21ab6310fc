"""The CUDA platform: one NVIDIA GPU."""

from __future__ import annotations

from dataclasses import replace

from kvhoist.platform.base import Capabilities, Device
from kvhoist.platform.cuda_driver import CudaDriver
from kvhoist.platform.gpu import GpuPlatform

CAPABILITIES = Capabilities(
    engines=("staged", "dma", "mapped"),
    asynchronous=True,
    host_visible=False,
    registers_host=True,
    launches_kernels=True,
    block_quota=2,  # design, copy engines
)
"""Of every NVIDIA GPU; the device at hand adds its own."""


class CudaPlatform(GpuPlatform):
    """One NVIDIA GPU. Uses the device's primary context, which torch uses too. ConfigError where there is none."""

    def __init__(self, device: Device) -> None:
        driver = CudaDriver(device.index)
        super().__init__("cuda", device, driver, replace(CAPABILITIES, compute_capability=driver.compute_capability))
