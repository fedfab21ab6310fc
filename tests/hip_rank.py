"""One rank on the simulated HIP runtime: a cache of arrays in its device memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from device_rank import GUARD, GUARD_BYTES, DeviceRank, Shape
from hip_simulator import device_array, on_device, simulator

from kvhoist.device_layout import DeviceCache
from kvhoist.platform.base import Event, Stream


class HipRank(DeviceRank):
    """`shared`: the layers of a component stand in one allocation, as those of one tensor do."""

    def __init__(self, shape: Shape, *, shared: bool = False, **options: Any) -> None:
        self._shared = shared
        self._random = np.random.default_rng(3)
        super().__init__(shape, **options)
        self.model: Stream = self.platform.make_stream()

    def snapshot(self) -> dict[str, list[np.ndarray]]:
        for whole in self._guarded:
            assert (whole[..., :GUARD_BYTES] == GUARD).all()
            assert (whole[..., -GUARD_BYTES:] == GUARD).all()
        return {name: [tensor.copy() for tensor in held] for name, held in self.tensors.items()}

    def enqueue(self, work: Callable[[], object]) -> None:
        """Let the model's stream do `work`."""
        simulator().enqueue(self.model, work)

    def record(self) -> Event:
        """Return the point that the model's stream has reached."""
        return self.platform.record(self.model)

    def _layers(self, shape: tuple[int, ...], num_layers: int) -> list[np.ndarray]:
        length = math.prod(shape)
        pitch = length + 2 * GUARD_BYTES
        if self._shared:
            rows = list(device_array(self.platform, (num_layers, pitch)))
        else:
            rows = [device_array(self.platform, (pitch,)) for _ in range(num_layers)]
        for row in rows:
            row[:] = GUARD
            row[GUARD_BYTES:-GUARD_BYTES] = self._random.integers(0, 256, length, dtype=np.uint8)
        self._guarded += rows
        return [row[GUARD_BYTES:-GUARD_BYTES].reshape(shape) for row in rows]

    def _read(self) -> DeviceCache:
        return on_device(super()._read(), self.platform)
