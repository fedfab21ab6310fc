"""The checksum of a page: XXH3-128, and other threads run while it is taken."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
import xxhash

from kvhoist.checksum import checksum

PATIENCE_S = 20.0


@pytest.mark.parametrize("num_bytes", [0, 1, 240, 241, 65536, 65537, (1 << 20) + 3])
def test_it_is_xxh3_128(num_bytes: int) -> None:
    data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
    assert checksum(memoryview(data)) == xxhash.xxh3_128_digest(data)


def test_another_thread_runs_meanwhile() -> None:
    data = memoryview(bytearray(256 << 20))
    stamps: list[float] = []
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            stamps.append(time.perf_counter())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until = time.monotonic() + PATIENCE_S
        while True:  # once is enough: a busy machine may let nobody else run
            stamps.clear()
            begin = time.perf_counter()
            checksum(data)
            end = time.perf_counter()
            within = [begin, *(stamp for stamp in stamps[:] if begin < stamp < end), end]
            longest = max(b - a for a, b in itertools.pairwise(within))
            if longest < (end - begin) / 2:
                return
            assert time.monotonic() < until, f"nobody else ran for {longest:.3f} of {end - begin:.3f} s"
    finally:
        ended.set()
        thread.join()
