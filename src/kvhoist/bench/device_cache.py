"""A device cache for benchmarks, without torch: plain memory of a platform, laid out as an engine's tensors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from kvhoist.device_layout import DeviceCache, read_device_layout
from kvhoist.geometry import CacheGroup
from kvhoist.platform.base import MemoryRegion, Platform


class DeviceTensor:
    """Device memory as far as `read_device_layout` looks at tensors: contiguous bytes of `shape`."""

    dtype = "uint8"

    def __init__(self, platform: Platform, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.region: MemoryRegion = platform.allocate(int(np.prod(shape)))
        self.device = SimpleNamespace(type=platform.device.type, index=platform.device.index)

    def data_ptr(self) -> int:
        return self.region.address

    def nbytes(self) -> int:
        return self.region.num_bytes

    def stride(self) -> tuple[int, ...]:
        return tuple(int(np.prod(self.shape[i + 1 :])) for i in range(len(self.shape)))

    def element_size(self) -> int:
        return 1

    def untyped_storage(self) -> DeviceTensor:
        return self


def device_cache(platform: Platform, group: CacheGroup, num_pages: int) -> DeviceCache:
    """Return a layer-first cache of random bytes: [blocks, tokens, row bytes] a layer and component, each an allocation
    of its own, which the cache keeps."""
    blocks, rng = num_pages * group.blocks_per_page, np.random.default_rng(0)
    tensors: dict[str, list[DeviceTensor]] = {}
    for component in group.components:
        shape = (blocks, group.block_tokens, component.row_bytes)
        tensors[component.name] = [DeviceTensor(platform, shape) for _ in component.layers]
        for tensor in tensors[component.name]:
            platform.write(tensor.region, rng.integers(0, 256, tensor.region.num_bytes, dtype=np.uint8))
    return read_device_layout(group, tensors, "block token dim")
