"""One rank on a GPU: a cache of torch tensors."""

from __future__ import annotations

import math

import numpy as np
import torch
from device_rank import DEADLINE_S, ENGINES, GUARD, GUARD_BYTES, DeviceRank, Shape, same, shapes

from kvhoist.platform.base import Event

__all__ = ["DEADLINE_S", "ENGINES", "GpuRank", "Shape", "same", "shapes"]


class GpuRank(DeviceRank):
    def snapshot(self) -> dict[str, list[np.ndarray]]:
        torch.cuda.synchronize()
        for whole in self._guarded:
            assert (whole[:GUARD_BYTES] == GUARD).all()
            assert (whole[-GUARD_BYTES:] == GUARD).all()
        return {name: [tensor.cpu().numpy().copy() for tensor in held] for name, held in self.tensors.items()}

    def _layers(self, shape: tuple[int, ...], num_layers: int) -> list[torch.Tensor]:
        return [self._random(shape) for _ in range(num_layers)]

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        length = math.prod(shape)
        whole = torch.full((length + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8, device="cuda")
        self._guarded.append(whole)
        inner = whole[GUARD_BYTES:-GUARD_BYTES]
        inner.random_(0, 256)
        return inner.view(shape)

    def record(self) -> Event:
        """Return the point that torch's current stream has reached."""
        return self.platform.record(self.platform.wrap_stream(torch.cuda.current_stream().cuda_stream))
