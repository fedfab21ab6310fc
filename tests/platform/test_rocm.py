"""The ROCm platform keeps the protocol's promises, on the simulated HIP runtime."""

from __future__ import annotations

from typing import Any

from kvhoist.platform.base import Device
from kvhoist.platform.open import open_platform

DEVICE = Device("cuda", 0)


def test_a_process_that_holds_a_hip_runtime_has_amds_gpus(hip: Any) -> None:
    platform = open_platform(DEVICE)
    assert (platform.name, platform.device) == ("rocm", DEVICE)
    capabilities = platform.capabilities
    assert (capabilities.gpu_arch, capabilities.compute_capability) == ("gfx942", None)
    assert (capabilities.block_quota, capabilities.multiprocessors, capabilities.max_pitch_bytes) == (16, 4, 1 << 20)
