"""The device that a part measures: this machine's AMD GPU, or a simulated one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

from kvhoist.platform.base import Device
from kvhoist.platform.gpu import GpuPlatform
from kvhoist.platform.open import open_platform

Row: TypeAlias = dict[str, Any]
"""What a part found, as plain data. "pass": whether it is as it must be, where anything must. "skipped": why there is
nothing to say here."""

DEVICE = Device("cuda", 0)


class Target:
    """`simulator` is the folder of a simulated HIP runtime that was built there; None is this machine's GPU."""

    def __init__(self, simulator: Path | None = None) -> None:
        self._folder = simulator
        self._simulator: Any = None
        self.is_simulated = simulator is not None

    def load(self) -> None:
        """Let this process hold the HIP runtime: the simulated one with its kernels; else torch's, where torch is built
        for ROCm; else the platform takes the system's."""
        if self._folder is None:
            if importlib.util.find_spec("torch") is not None:
                import torch  # noqa: F401, brings its runtime

            return
        from hip_simulator import Simulator

        from kvhoist.copy import device_kernels

        self._simulator = Simulator(self._folder)
        image = self._simulator.image
        device_kernels.compile_kernels = lambda *_, **__: SimpleNamespace(image=image)  # type: ignore[assignment]

    def open(self) -> GpuPlatform:
        """Return the platform of the first GPU that HIP shows (HIP_VISIBLE_DEVICES chooses), in use by this thread.
        Raises as `open_platform` does."""
        platform = open_platform(DEVICE)
        assert isinstance(platform, GpuPlatform)
        platform.enter_thread()
        return platform

    def accesses(self) -> Iterator[Row]:
        """Yield what a simulated runtime has against what it was asked to do: nothing, if all is well."""
        if self._simulator is not None:
            said = self._simulator.message
            yield {"what": "accesses, as the simulated runtime saw them", "found": said or "right", "pass": not said}
