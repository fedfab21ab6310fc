"""Which platform serves a device."""

from __future__ import annotations

from kvhoist.errors import ConfigError
from kvhoist.platform.base import CPU, Device, Platform
from kvhoist.platform.cpu import CpuPlatform
from kvhoist.platform.rocm_library import holds_amd_gpus
from kvhoist.settings import Settings


def open_platform(device: Device = CPU) -> Platform:
    """Return the platform of `device`. torch calls AMD's GPUs `cuda` too: they are meant where this process holds a HIP
    runtime and no torch for NVIDIA's GPUs, or where KVHOIST_PLATFORM says so.

    Raises ConfigError for a device type that no platform serves, and as the platform does.
    """
    if device.type == CPU.type:
        return CpuPlatform()
    if device.type == "cuda":
        if (Settings.from_env().gpu_platform or ("rocm" if holds_amd_gpus() else "cuda")) == "rocm":
            from kvhoist.platform.rocm import RocmPlatform

            return RocmPlatform(device)
        from kvhoist.platform.cuda import CudaPlatform

        return CudaPlatform(device)
    raise ConfigError(
        "no platform serves this device", got=device, choices=["cpu", "cuda"], remedy="Keep the KV tensors on one."
    )
