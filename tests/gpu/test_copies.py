"""The copy engines on a GPU, through the mover: every byte of cache and arena against the numpy oracle."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from device_rank import move_around_capacity, ring_of
from gpu_rank import DEADLINE_S, ENGINES, GpuRank, Shape, same, shapes

from kvhoist.errors import ConfigError
from kvhoist.messages import LEFT_OUT, JobKind
from kvhoist.platform.base import Device
from kvhoist.platform.open import open_platform

BY_NAME = {shape.name: shape for shape in shapes()}
SMALL_RING = 4 << 20

every_engine = pytest.mark.parametrize("engine", ENGINES)


@every_engine
@pytest.mark.parametrize("order", ["page_first_direct", "page_first"])
@pytest.mark.parametrize("shape", BY_NAME.values(), ids=BY_NAME)
def test_what_is_copied_is_what_the_oracle_copies_and_nothing_else_changes(
    shape: Shape, order: str, engine: str
) -> None:
    with GpuRank(shape, num_blocks=160, order=order, staging_bytes=ring_of(shape), io_backend=engine) as rank:
        move_around_capacity(rank)


@every_engine
@pytest.mark.parametrize("name", ["blocks of tokens", "latent and index"])
def test_blocks_left_out_of_a_load_are_left_alone(name: str, engine: str) -> None:
    with GpuRank(BY_NAME[name], num_blocks=160, io_backend=engine) as rank:
        pages, blocks = rank.picked(9, 3)
        blocks[0] = blocks[5] = blocks[-1] = LEFT_OUT
        wanted = rank.expected_load(pages, blocks)
        done = rank.submit(JobKind.LOAD, pages, blocks).result(DEADLINE_S)
        assert done.bytes == rank.group.page_bytes * 9 * (len(blocks) - 3) // len(blocks)
        assert same(wanted, rank.snapshot())


@every_engine
def test_a_copy_of_neighbouring_host_pages_is_right_too(engine: str) -> None:
    with GpuRank(BY_NAME["blocks of tokens"], num_blocks=160, io_backend=engine) as rank:
        _, blocks = rank.picked(12, 3)
        pages = list(range(20, 32))
        wanted = rank.expected_offload(pages, blocks)
        rank.submit(JobKind.OFFLOAD, pages, blocks).result(DEADLINE_S)
        assert (rank.arena.buffer == wanted).all()


@every_engine
@pytest.mark.parametrize("ring", [SMALL_RING, 256 << 20], ids=["small ring", "large ring"])
def test_offloads_start_after_their_producer_and_loads_end_before_their_consumer(ring: int, engine: str) -> None:
    """A slow kernel writes what is offloaded; a consumer reads what is loaded at once. Hundreds of random rounds."""
    with GpuRank(BY_NAME["blocks of tokens"], num_blocks=160, staging_bytes=ring, io_backend=engine) as rank:
        rng = random.Random(5)
        model = torch.cuda.Stream()
        stream = rank.platform.wrap_stream(model.cuda_stream)
        keys = rank.tensors["k"]
        for turn in range(150):
            count = rng.choice((1, 3, 12))
            pages, blocks = rank.picked(count, turn)
            others = rank.picked(count, 1000 + turn)[1]
            value = rng.randrange(256)
            index = torch.tensor(blocks, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(model):
                torch.cuda._sleep(rng.choice((100_000, 2_000_000)))
                for tensor in keys:
                    tensor[index] = value
                offload = rank.submit(JobKind.OFFLOAD, pages, blocks, rank.record())
                offload.wait_read(stream)
                for tensor in keys:
                    tensor[index] = 255 - value  # after it was read
                assert offload.result(DEADLINE_S).failed_pages == ()
                load = rank.submit(JobKind.LOAD, pages, others, rank.record())
                wanted = torch.tensor(others, device="cuda")
                right = []
                for layer in rank.group.layers:
                    load.wait(layer, stream=stream)
                    right.append((keys[layer][wanted] == value).all())
                assert torch.stack(right).all(), f"turn {turn}"
            assert load.result(DEADLINE_S).failed_pages == ()


@every_engine
def test_copies_of_both_directions_at_once_share_the_ring(engine: str) -> None:
    with GpuRank(
        BY_NAME["slots, whole pages"], num_blocks=200, host_pages=120, staging_bytes=SMALL_RING, io_backend=engine
    ) as rank:
        for turn in range(20):
            rng = random.Random(turn)
            pages, blocks = rng.sample(range(120), 80), rng.sample(range(200), 80)
            offload, load = (pages[:40], blocks[:40]), (pages[40:], blocks[40:])
            wanted, loaded = rank.expected_offload(*offload), rank.expected_load(*load)
            transfers = [rank.submit(JobKind.OFFLOAD, *offload), rank.submit(JobKind.LOAD, *load)]
            assert all(transfer.result(DEADLINE_S).failed_pages == () for transfer in transfers)
            assert (rank.arena.buffer == wanted).all()
            assert same(loaded, rank.snapshot())


@every_engine
@pytest.mark.parametrize("name", ["blocks of tokens", "slots, whole pages"])
def test_debug_verify_passes_what_is_right_and_refuses_a_corrupt_page(name: str, engine: str) -> None:
    with GpuRank(BY_NAME[name], num_blocks=160, debug_verify=True, io_backend=engine) as rank:
        pages, blocks = rank.picked(6, 3)
        assert rank.submit(JobKind.OFFLOAD, pages, blocks).result(DEADLINE_S).failed_pages == ()
        elsewhere = rank.picked(6, 4)[1]
        if rank.ids_per_page > 1:
            elsewhere[1] = LEFT_OUT
        assert rank.submit(JobKind.LOAD, pages, elsewhere).result(DEADLINE_S).failed_pages == ()
        rank.arena.page(pages[2])[11] ^= 1
        assert rank.submit(JobKind.LOAD, pages, elsewhere).result(DEADLINE_S).failed_pages == (2,)
        assert rank.mover.num_mismatches == 1


@every_engine
def test_bad_ids_fail_the_job_and_write_nothing(engine: str) -> None:
    with GpuRank(BY_NAME["blocks of tokens"], num_blocks=160, io_backend=engine) as rank:
        before, arena = rank.snapshot(), rank.arena.buffer.copy()
        pages, blocks = rank.picked(3, 3)
        for bad in (10**6, blocks[1]):
            blocks[0] = bad
            assert rank.submit(JobKind.LOAD, pages, blocks).result(DEADLINE_S).failed_pages == (0, 1, 2)
        assert same(before, rank.snapshot())
        assert (rank.arena.buffer == arena).all()


def test_a_ring_that_cannot_pass_a_page_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="staging_bytes"):
        GpuRank(BY_NAME["blocks of tokens"], staging_bytes=64 << 10, io_backend="staged")


@every_engine
def test_graph_capture_on_another_thread_is_not_disturbed(engine: str) -> None:
    """Jobs run while torch captures a graph in its default, global mode; the graph replays."""
    with GpuRank(BY_NAME["blocks of tokens"], num_blocks=160, io_backend=engine) as rank:
        pages, blocks = rank.picked(12, 3)
        values = torch.zeros(1 << 20, device="cuda")
        graph = torch.cuda.CUDAGraph()
        transfers = []
        with torch.cuda.graph(graph):
            for _ in range(50):
                transfers.append(rank.submit(JobKind.OFFLOAD, pages, blocks))
                values += 1
        assert all(transfer.result(DEADLINE_S).failed_pages == () for transfer in transfers)
        graph.replay()
        torch.cuda.synchronize()
        assert (values == 50).all()


def test_device_memory_comes_back_from_a_thread_that_never_used_the_device() -> None:
    platform = open_platform(Device("cuda", 0))
    before = torch.cuda.mem_get_info()[0]
    held = [platform.allocate(512 << 20)]
    assert torch.cuda.mem_get_info()[0] < before
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(DEADLINE_S)
    assert torch.cuda.mem_get_info()[0] == before


def test_closing_unpins_the_arena_and_frees_the_ring() -> None:
    free = []
    for _ in range(6):
        with GpuRank(BY_NAME["slots, whole pages"]) as rank:
            rank.submit(JobKind.OFFLOAD, [0], [0]).result(DEADLINE_S)
        del rank
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] == free[2], "device memory leaks from rank to rank"
    assert np.all(np.diff(free[2:]) == 0)
