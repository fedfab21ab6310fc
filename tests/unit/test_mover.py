"""The mover of one rank: blocks left out of a load, what is counted, and a rank that writes nothing to storage."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mover_support import BLOCKS_PER_PAGE, DEADLINE_S, HeldStore, Rank, blob_of, storage_key

from kvhoist.errors import ClosedError
from kvhoist.messages import LEFT_OUT, Completion, JobKind

GUARD = 7


def half_page(rank: Rank) -> int:
    return rank.group.page_bytes // BLOCKS_PER_PAGE


# -- blocks left out of a load -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [False, True])
def test_a_block_left_out_of_a_load_is_left_alone_and_not_counted(verify: bool) -> None:
    with Rank(debug_verify=verify) as rank:
        rank.offload([1, 2], [3, 0])
        wanted = rank.tensor.copy()
        rank.tensor[:] = GUARD
        loaded = rank.run(JobKind.LOAD, [1, 2], [3, 0], blocks=[LEFT_OUT, 9, 4, LEFT_OUT])
        assert (loaded.failed_pages, loaded.error, loaded.bytes) == ((), None, 2 * half_page(rank))
        expected = np.full_like(rank.tensor, GUARD)
        expected[:, 9], expected[:, 4] = wanted[:, 1], wanted[:, 2]
        assert (rank.tensor == expected).all()


@pytest.mark.parametrize("verify", [False, True])
def test_a_load_all_of_whose_blocks_are_left_out_moves_nothing_and_is_done(verify: bool) -> None:
    with Rank(debug_verify=verify) as rank:
        rank.offload([1, 2], [3, 0])
        rank.tensor[:] = GUARD
        transfer = rank.submit(JobKind.LOAD, [1, 2], [3, 0], blocks=[LEFT_OUT] * 4)
        for layer in rank.group.layers:
            transfer.wait(layer, timeout_s=DEADLINE_S)
        loaded = transfer.result(DEADLINE_S)
        assert (loaded.failed_pages, loaded.error, loaded.bytes) == ((), None, 0)
        assert (rank.tensor == GUARD).all()


def test_an_offload_that_leaves_a_block_out_fails_and_writes_nothing() -> None:
    with Rank() as rank:
        rank.offload([1], [0])
        refused = rank.run(JobKind.OFFLOAD, [2], [0], blocks=[0, LEFT_OUT])
        assert (refused.failed_pages, refused.bytes) == ((0,), 0)
        assert "[-1]" in str(refused.error)
        assert bytes(rank.arena.page(0)) == blob_of(1)


@pytest.mark.parametrize("block", [-2, 12, 1 << 40])
def test_only_minus_one_leaves_a_block_out(block: int) -> None:
    with Rank() as rank:
        rank.offload([1], [0])
        before = rank.tensor.copy()
        refused = rank.run(JobKind.LOAD, [1], [0], blocks=[3, block])
        assert refused.failed_pages == (0,)
        assert "or -1 for a block to be left out" in str(refused.error)
        assert (rank.tensor == before).all()


class Tampering(Rank):
    """Damages the device after the bytes of a load arrived and before `debug_verify` reads them back."""

    def __init__(self, *blocks: int, **options: Any) -> None:
        super().__init__(debug_verify=True, **options)
        digests = self.mover._copies._digests
        compare = digests.mismatches

        def damage_first(*arguments: Any) -> tuple[int, ...]:
            self.tensor[1, list(blocks), 1, 2] ^= 1
            return compare(*arguments)

        digests.mismatches = damage_first


@pytest.mark.parametrize(
    ("damaged", "failed"), [((9,), (0,)), ((4,), (1,)), ((9, 4), (0, 1)), ((8, 5), ()), ((0, 1, 2, 3), ())]
)
def test_the_read_back_sees_every_written_block_and_no_block_left_out(
    damaged: tuple[int, ...], failed: tuple[int, ...]
) -> None:
    """Page 1 goes to blocks 8 and 9 but for 8, page 2 to blocks 4 and 5 but for 5."""
    with Tampering(*damaged) as rank:
        rank.offload([1, 2], [3, 0])
        rank.tensor[:] = GUARD
        loaded = rank.run(JobKind.LOAD, [1, 2], [3, 0], blocks=[LEFT_OUT, 9, 4, LEFT_OUT])
        assert loaded.failed_pages == failed
        assert rank.mover.num_mismatches == len(failed)


@pytest.mark.parametrize("block_in_page", [0, 1])
def test_the_read_back_sees_a_corrupted_host_page_through_the_block_that_was_written(block_in_page: int) -> None:
    with Rank(debug_verify=True) as rank:
        rank.offload([1, 2], [3, 0])
        rows = block_in_page * 4 * 32
        rank.arena.page(3)[rows] ^= 1
        blocks = [LEFT_OUT] * 4
        blocks[block_in_page] = 6
        blocks[2] = 7
        assert rank.run(JobKind.LOAD, [1, 2], [3, 0], blocks=blocks).failed_pages == (0,)


@given(st.permutations(range(12)), st.lists(st.booleans(), min_size=8, max_size=8), st.permutations(range(4)))
def test_any_blocks_may_be_left_out_of_any_pages(order: list[int], left_out: list[bool], pages: list[int]) -> None:
    blocks = [LEFT_OUT if out else block for block, out in zip(order, left_out, strict=False)]
    with Rank(debug_verify=True) as rank:
        rank.offload([1, 2, 3, 4], pages)
        wanted = rank.tensor.copy()
        rank.tensor[:] = GUARD
        loaded = rank.run(JobKind.LOAD, [1, 2, 3, 4], pages, blocks=blocks)
        assert (loaded.failed_pages, loaded.bytes) == ((), left_out.count(False) * half_page(rank))
        expected = np.full_like(rank.tensor, GUARD)
        for source, block in enumerate(blocks):
            if block != LEFT_OUT:
                expected[:, block] = wanted[:, source]
        assert (rank.tensor == expected).all()


# -- a rank that does not write ------------------------------------------------------------------------------------


def test_a_rank_that_does_not_persist_answers_as_done_and_writes_nothing() -> None:
    store = HeldStore()
    with Rank(store=store, persists=False, early_persist=True) as rank:
        rank.offload([1, 2], [3, 0])
        for kind, host_pages in ((JobKind.PERSIST, [3, 0]), (JobKind.DROP, [])):
            transfer = rank.submit(kind, [1, 2], host_pages)
            assert transfer.done
            assert transfer.completion == rank.answers[-1] == Completion(transfer.job.id, 0)
        assert rank.mover.wait_idle(DEADLINE_S)
        assert (store.begun, rank.io.stats().persisted_pages, rank.mover.num_open) == ([], 0, 0)


def test_a_rank_that_does_not_persist_still_asks_storage_and_reads_it() -> None:
    store = HeldStore()
    with Rank(store=store) as writer:
        writer.offload([1], [2])
        assert writer.run(JobKind.PERSIST, [1], [2]).bytes == writer.group.page_bytes
        with Rank(store=store, persists=False) as reader:
            assert reader.run(JobKind.DROP, [1]).error is None
            assert reader.run(JobKind.LOOKUP, [1, 2]).failed_pages == (1,)
            assert reader.run(JobKind.PREFETCH, [1, 2], [0, 1]).failed_pages == (1,)
            assert bytes(reader.arena.page(0)) == blob_of(1)
    assert list(store.written) == [storage_key(1)]


def test_a_rank_without_storage_and_nothing_to_persist_needs_none() -> None:
    with Rank(persists=False) as rank:
        assert rank.run(JobKind.PERSIST, [1], [0]).error is None
        with pytest.raises(ClosedError, match="needs a store"):
            rank.submit(JobKind.LOOKUP, [1])
    with Rank(early_persist=True) as rank:
        assert rank.offload([1], [0]).error is None
        with pytest.raises(ClosedError, match="needs a store"):
            rank.submit(JobKind.PERSIST, [1], [0])


# -- what a job comes to -------------------------------------------------------------------------------------------


def test_whole_pages_are_counted_whole() -> None:
    with Rank() as rank:
        assert rank.offload([1, 2, 3], [3, 0, 1]).bytes == 3 * rank.group.page_bytes
        assert rank.run(JobKind.LOAD, [1, 3], [3, 1], [4, 5]).bytes == 2 * rank.group.page_bytes
        assert rank.holds(1, 4)
        assert rank.holds(3, 5)


def test_a_closed_mover_has_no_threads() -> None:
    before = set(threading.enumerate())
    with Rank(store=HeldStore(), early_persist=True) as rank:
        rank.offload([1], [0])
        assert set(threading.enumerate()) - before
    assert set(threading.enumerate()) - before == set()
