"""What the tests of the ROCm platform share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvhoist.platform.base import Device, region_of
from kvhoist.platform.rocm import RocmPlatform


@pytest.fixture
def platform(hip: Any) -> RocmPlatform:
    return RocmPlatform(Device("cuda", 0))


@pytest.fixture
def pinned() -> np.ndarray:
    """Three pages of host memory, on page boundaries."""
    raw = np.zeros(4 * 4096, np.uint8)
    start = -region_of(raw).address % 4096
    return raw[start : start + 3 * 4096]
