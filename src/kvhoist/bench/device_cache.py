"""A device cache for benchmarks, without torch: plain memory of a platform, laid out as an engine's tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvhoist.device_layout import DeviceCache, read_device_layout
from kvhoist.geometry import CacheGroup
from kvhoist.platform.base import MemoryRegion, Platform


class DeviceTensor:
    """Device memory as far as `read_device_layout` looks at tensors: contiguous bytes of `shape`, `offset_bytes` behind
    the start of a region, which is its storage."""

    dtype = "uint8"

    def __init__(self, region: MemoryRegion, shape: tuple[int, ...], offset_bytes: int = 0) -> None:
        self.region = region
        self.shape = shape
        self.device = region.device
        self._offset_bytes = offset_bytes

    def data_ptr(self) -> int:
        return self.region.address + self._offset_bytes

    def nbytes(self) -> int:
        return math.prod(self.shape)

    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def element_size(self) -> int:
        return 1

    def untyped_storage(self) -> DeviceTensor:
        return DeviceTensor(self.region, (self.region.num_bytes,))


def device_cache(
    platform: Platform, group: CacheGroup, num_pages: int, *, one_allocation: bool = False, fill: bool = False
) -> DeviceCache:
    """Return a layer-first cache: [blocks, tokens, row bytes] a layer and component, each an allocation of its own or
    (`one_allocation`) one a component. The cache keeps them; `fill` puts random bytes into them."""
    blocks = num_pages * group.blocks_per_page
    made: list[DeviceTensor] = []

    def tensor(*shape: int) -> DeviceTensor:
        made.append(DeviceTensor(platform.allocate(math.prod(shape)), shape))
        return made[-1]

    tensors: dict[str, Any] = {}
    for component in group.components:
        shape = (blocks, group.block_tokens, component.row_bytes)
        layers = len(component.layers)
        tensors[component.name] = tensor(layers, *shape) if one_allocation else [tensor(*shape) for _ in range(layers)]
    if fill:
        rng = np.random.default_rng(0)
        for one in made:
            platform.write(one.region, rng.integers(0, 256, one.region.num_bytes, dtype=np.uint8))
    axes = "block token dim"
    return read_device_layout(group, tensors, f"layer {axes}" if one_allocation else axes)
