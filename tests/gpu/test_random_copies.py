"""Random loads and offloads at once on a GPU, all bytes checked. KVHOIST_GPU_SECONDS sets the length (default 20)."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
from gpu_rank import DEADLINE_S, ENGINES, GpuRank, Shape, same, shapes

from kvhoist.messages import JobKind

SECONDS = float(os.environ.get("KVHOIST_GPU_SECONDS", "20"))


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize("shape", shapes(), ids=lambda shape: shape.name)
def test_any_mix_of_copies_leaves_exactly_the_bytes_that_it_should(shape: Shape, engine: str) -> None:
    """Jobs of a round touch different pages; beside them a kernel keeps the device busy."""
    rng = random.Random(shape.name)
    deadline = time.monotonic() + SECONDS / len(shapes()) / (1 + len(ENGINES))
    busy = torch.cuda.Stream()
    rounds = 0
    options = {"staging_bytes": rng.choice((4 << 20, 256 << 20)), "io_backend": engine}
    with GpuRank(shape, num_blocks=96, host_pages=48, **options) as rank:
        per_page = rank.ids_per_page
        while time.monotonic() < deadline or not rounds:
            rounds += 1
            pages = rng.sample(range(48), 96 // per_page if per_page > 2 else 48)
            blocks = rng.sample(range(96), len(pages) * per_page)
            half = len(pages) // 2
            wanted = rank.expected_offload(pages[:half], blocks[: half * per_page])
            loaded = rank.expected_load(pages[half:], blocks[half * per_page :])
            jobs = []
            first = 0
            while first < len(pages):
                stop = min(first + rng.randint(1, 9), half if first < half else len(pages))
                kind = JobKind.OFFLOAD if first < half else JobKind.LOAD
                jobs.append((kind, pages[first:stop], blocks[first * per_page : stop * per_page]))
                first = stop
            rng.shuffle(jobs)
            with torch.cuda.stream(busy):
                torch.cuda._sleep(rng.randint(0, 3_000_000))
                transfers = [rank.submit(*job, rng.choice((None, rank.record()))) for job in jobs]
            assert all(transfer.result(DEADLINE_S).failed_pages == () for transfer in transfers)
            assert (rank.arena.buffer == wanted).all(), f"round {rounds}"
            assert same(loaded, rank.snapshot()), f"round {rounds}"
    print(f"{shape.name}, {engine}: {rounds} rounds")
