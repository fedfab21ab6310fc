"""Which platform serves a device."""

from __future__ import annotations

from kvhoist.errors import ConfigError
from kvhoist.platform.base import CPU, Device, Platform
from kvhoist.platform.cpu import CpuPlatform


def open_platform(device: Device = CPU) -> Platform:
    """Return the platform of `device`. Raises ConfigError for a device type that no platform serves."""
    if device.type == CPU.type:
        return CpuPlatform()
    if device.type == "cuda":
        from kvhoist.platform.cuda import CudaPlatform

        return CudaPlatform(device)
    raise ConfigError(
        "no platform serves this device", got=device, choices=["cpu", "cuda"], remedy="Keep the KV tensors on one."
    )
