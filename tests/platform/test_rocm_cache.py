"""A whole cache on the simulated HIP runtime: every tier brings back what was computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hip_simulator import device_array, on_device
from support import TinyEngine

from kvhoist.config import CacheConfig
from kvhoist.device_layout import DeviceCache
from kvhoist.platform.base import Device
from kvhoist.platform.rocm import RocmPlatform
from kvhoist.storage import MemoryStore

TOKENS = list(range(40, 61))


class HipEngine(TinyEngine):
    """Computes into simulated device memory, in the calling thread: when the default stream has come as far."""

    def __init__(self, **options: Any) -> None:
        self.platform = RocmPlatform(Device("cuda", 0))
        super().__init__(**options)

    def tensor(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        array = device_array(self.platform, shape, np.float16)
        array[:] = 7
        return array

    def read(self, cache: DeviceCache) -> DeviceCache:
        return on_device(cache, self.platform)

    def compute(self, *page: Any) -> None:
        self.platform.wrap_stream(0).synchronize()
        super().compute(*page)

    def check(self, *prefix: Any) -> None:
        self.platform.wrap_stream(0).synchronize()
        super().check(*prefix)


@pytest.mark.parametrize("engine", ["auto", "staged", "dma", "mapped"])
def test_every_tier_brings_back_what_was_computed(hip: Any, engine: str) -> None:
    config = CacheConfig(io_backend=engine, staging_bytes="1MiB", debug_verify=True)
    with HipEngine(device_pages=8, host_pages=22, store=MemoryStore("1MiB"), config=config) as tiny:
        for tier, others in (("", ()), ("device", ()), ("host", range(1, 3)), ("storage", range(3, 9))):
            for other in others:
                tiny.run([1000 * other + i for i in range(32)])
                assert tiny.cache.flush()
            found = tiny.run(TOKENS)
            assert tiny.cache.flush()
            assert {name: tokens for name, tokens in found.items() if tokens} == ({} if not tier else {tier: 20})
        assert tiny.cache.stats().num_mismatches == 0
