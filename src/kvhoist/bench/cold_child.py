"""One run of `kvhoist.bench.cold`: python -m kvhoist.bench.cold_child DEVICE_TYPE DEVICE_INDEX STARTED.

STARTED is what `time.monotonic_ns` said in the process that started this one; the clock is the system's. Prints a JSON
object of seconds by phase, `pages` and `bytes` of each transfer, and `device` for a GPU. `start_s` is Python and the
imports; the engine's part, the device cache, is in no phase.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from kvhoist.bench.device_cache import device_cache
from kvhoist.bench.facts import gpu
from kvhoist.errors import KvhoistError
from kvhoist.geometry import CacheGeometry
from kvhoist.memory.arena import HostArena
from kvhoist.memory.pinned import touch_threads
from kvhoist.messages import Job, JobKind
from kvhoist.mover import Mover
from kvhoist.platform.base import CPU, Device
from kvhoist.platform.open import open_platform

GROUP = CacheGeometry.attention(16, k_row_bytes=512, v_row_bytes=512, page_tokens=64, blocks_per_page=4).groups[0]
NUM_PAGES = 8

_DEADLINE_S = 60


class _Phases:
    """Seconds since the last phase ended, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.restart()

    def restart(self) -> None:
        self._began = time.perf_counter()

    def end(self, name: str) -> None:
        self.seconds[name] = time.perf_counter() - self._began
        self.restart()


def measure(device: Device) -> dict[str, Any]:
    """Open `device`, build a mover, offload and load 8 pages twice, compare, and return seconds by phase.

    The second offload reads what the first load wrote. Raises KvhoistError where its bytes are not those of the first.
    """
    phases = _Phases()
    platform = open_platform(device)
    platform.enter_thread()
    phases.end("open_s")
    cache = device_cache(platform, GROUP, 2 * NUM_PAGES, fill=True)
    phases.restart()
    arena = HostArena(GROUP, num_pages=2 * NUM_PAGES, first_touch_threads=touch_threads(platform))
    mover = Mover(GROUP, cache, arena, platform=platform, on_complete=lambda answer: None)
    phases.end("build_s")
    steps = (
        ("first_offload_s", JobKind.OFFLOAD, 0, 0),
        ("first_load_s", JobKind.LOAD, 0, 1),
        ("second_offload_s", JobKind.OFFLOAD, 1, 1),
        ("second_load_s", JobKind.LOAD, 1, 0),
    )
    for number, (name, kind, host_half, device_half) in enumerate(steps):
        answer = mover.submit(_job(number, kind, host_half, device_half)).result(_DEADLINE_S)
        phases.end(name)
        if answer.failed_pages:
            raise KvhoistError(f"pages failed in {name}", got=answer.error)
    wrong = [page for page in range(NUM_PAGES) if bytes(arena.page(page)) != bytes(arena.page(NUM_PAGES + page))]
    mover.close(timeout_s=_DEADLINE_S)
    if wrong:
        raise KvhoistError("pages came back from the device with other bytes", got=f"host pages {wrong}")
    return {**phases.seconds, "pages": NUM_PAGES, "bytes": NUM_PAGES * GROUP.page_bytes}


def _job(number: int, kind: JobKind, host_half: int, device_half: int) -> Job:
    """Return a job between one half of the host pages and one half of the device's blocks."""
    blocks = NUM_PAGES * GROUP.blocks_per_page
    return Job(
        number,
        kind,
        bytes(32),
        0,
        tuple(page.to_bytes(32, "little") for page in range(NUM_PAGES)),
        tuple(range(host_half * NUM_PAGES, (host_half + 1) * NUM_PAGES)),
        tuple(range(device_half * blocks, (device_half + 1) * blocks)),
    )


def main() -> None:
    start_s = (time.monotonic_ns() - int(sys.argv[3])) * 1e-9
    device = Device(sys.argv[1], int(sys.argv[2]))
    answer = {"start_s": start_s, **measure(device)}
    if device.type != CPU.type:
        answer["device"] = gpu(device)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
