"""One measurement of `kvhoist.bench.alloc`: python -m kvhoist.bench.alloc_child ARM BYTES DEVICE_TYPE DEVICE_INDEX.

Prints a JSON object: `make_s`, `parts` (what of that is what), `close_s`; `grown`, bytes by which VmLck, VmPin and
VmRSS of /proc/self/status grew; `left_bytes`, resident after the end more than before; `device` for a GPU.
The device is open, and each arm has pinned a page, before the clock runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from kvhoist.bench.facts import gpu
from kvhoist.bench.process import memory_bytes
from kvhoist.geometry import CacheGeometry
from kvhoist.memory.arena import HostArena
from kvhoist.memory.pinned import PinnedArena, touch_threads
from kvhoist.platform.base import CPU, Device
from kvhoist.platform.open import open_platform

GROUP = CacheGeometry.attention(32, k_row_bytes=1024, v_row_bytes=1024, page_tokens=64).groups[0]
"""Pages of 4 MiB, so that any number of MiB that four divides is whole pages."""

_PAGE = 4096


class Arm(Protocol):
    """One way to make host memory. `make` once, then `close`."""

    def make(self, num_bytes: int) -> dict[str, float]:
        """Make `num_bytes`, all of it backed by memory, and return seconds of the parts of that."""
        ...

    def close(self) -> None:
        """Give it all back to the system."""
        ...


class ArenaArm:
    """kvhoist's own: mapped, written once by several threads, registered in pieces."""

    def __init__(self, device: Device) -> None:
        self._platform = open_platform(device)
        self._platform.enter_thread()
        self._threads = touch_threads(self._platform) or min(16, os.cpu_count() or 1)
        self.make(GROUP.page_pitch_bytes)
        self.close()

    def make(self, num_bytes: int) -> dict[str, float]:
        began = time.perf_counter()
        pages = num_bytes // GROUP.page_pitch_bytes
        self._arena = HostArena(GROUP, num_pages=pages, first_touch_threads=self._threads)
        touched = time.perf_counter()
        self._pinned: PinnedArena | None = PinnedArena(self._arena, self._platform)
        if self._arena.num_bytes != num_bytes:
            raise AssertionError(f"{num_bytes} B are no whole pages of {GROUP.page_pitch_bytes} B")
        return {"touch_s": touched - began, "register_s": time.perf_counter() - touched}

    def close(self) -> None:
        assert self._pinned is not None
        self._pinned.close()
        self._pinned = None  # it holds a view
        self._arena.close()


class TorchArm:
    """torch's caching host allocator."""

    def __init__(self, device: Device) -> None:
        import torch

        self._torch: Any = torch
        torch.cuda.set_device(device.index)
        torch.zeros(1, device="cuda")
        self.make(_PAGE)
        self.close()

    def make(self, num_bytes: int) -> dict[str, float]:
        self._held: Any = self._torch.empty(num_bytes, dtype=self._torch.uint8, pin_memory=True)
        return {}

    def close(self) -> None:
        self._held = None
        self._torch._C._host_emptyCache()  # else the pool keeps it


class NumpyArm:
    """Zeroed memory of numpy, a byte of every 4 KiB written by one thread."""

    def __init__(self, device: Device) -> None:
        pass

    def make(self, num_bytes: int) -> dict[str, float]:
        self._held: Any = np.zeros(num_bytes, np.uint8)
        self._held[::_PAGE] = 0
        return {}

    def close(self) -> None:
        self._held = None


ARMS: Mapping[str, Callable[[Device], Arm]] = {"arena": ArenaArm, "torch": TorchArm, "numpy": NumpyArm}


def measure(arm: Arm, num_bytes: int) -> dict[str, Any]:
    """Make `num_bytes` and give them back; see the module for what is returned."""
    before = memory_bytes()
    began = time.perf_counter()
    parts = arm.make(num_bytes)
    make_s = time.perf_counter() - began
    between = memory_bytes()
    began = time.perf_counter()
    arm.close()
    return {
        "make_s": make_s,
        "parts": parts,
        "close_s": time.perf_counter() - began,
        "grown": {name: between.get(name, 0) - before.get(name, 0) for name in ("VmLck", "VmPin", "VmRSS")},
        "left_bytes": memory_bytes()["VmRSS"] - before["VmRSS"],
    }


def main() -> None:
    name, num_bytes, kind, index = sys.argv[1:]
    device = Device(kind, int(index))
    answer = measure(ARMS[name](device), int(num_bytes))
    if device.type != CPU.type:
        answer["device"] = gpu(device)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
