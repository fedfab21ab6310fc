"""Makes copy engines by name, and what those of one rank share when the first of them needs it."""

from __future__ import annotations

import contextlib
from types import TracebackType

from kvhoist.copy.device_kernels import DeviceKernels
from kvhoist.copy.dma import DmaCopy
from kvhoist.copy.engine import Between, CopyEngine
from kvhoist.copy.mapped import MappedCopy
from kvhoist.copy.ring import StagingRing
from kvhoist.copy.staged import StagedCopy, make_ring
from kvhoist.memory.arena import HostArena
from kvhoist.platform.base import Platform


class EngineMaker:
    """One staging ring a direction, and one set of kernels, for all engines that it makes. `block_quota` is how many
    blocks `mapped` may take from the model; None takes the platform's. A context manager: nothing may be under way at
    its end."""

    def __init__(
        self, platform: Platform, arena: HostArena, staging_bytes: int, block_quota: int | None = None
    ) -> None:
        self._platform = platform
        self._arena = arena
        self._staging_bytes = staging_bytes
        self._quota = platform.capabilities.block_quota if block_quota is None else block_quota
        self._kernels: DeviceKernels | None = None
        self._rings: dict[bool, StagingRing] = {}
        self._undo = contextlib.ExitStack()

    def __call__(self, engine: str, between: Between, num_groups: int) -> CopyEngine:
        """Return a new engine. Raises DeviceError where the device has no room for the ring, ConfigError for what the
        engine cannot move, and as `compile_kernels` does."""
        if engine == "dma":
            return DmaCopy(between, num_groups=num_groups)
        if self._kernels is None:
            self._kernels = self._undo.enter_context(DeviceKernels(self._platform))
        if engine == "mapped":
            return MappedCopy(between, self._kernels, block_quota=self._quota, num_groups=num_groups)
        if between.loads not in self._rings:
            self._rings[between.loads] = make_ring(self._platform, self._arena, self._staging_bytes)
        return StagedCopy(between, self._kernels, self._rings[between.loads], num_groups=num_groups)

    def __enter__(self) -> EngineMaker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
