"""Blocks that an offload still reads."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from kvhoist.adapters.vllm.fences import Fences
from kvhoist.messages import Job, JobKind


def job(number: int, blocks: tuple[int, ...]) -> Job:
    keys = tuple(bytes([number, i]) for i in range(len(blocks)))
    return Job(number, JobKind.OFFLOAD, b"n", 0, keys, tuple(range(len(blocks))), blocks)


def readers(fences: Fences, blocks: Iterable[int]) -> set[int]:
    fences.given += blocks
    return fences.take_readers()


def test_a_block_is_fenced_until_its_job_is_closed() -> None:
    fences = Fences()
    assert readers(fences, [1, 2]) == set()
    fences.open(job(7, (1, 2)))
    fences.open(job(8, (3,)))
    assert readers(fences, [0, 2, 3]) == {7, 8}
    fences.close(7)
    fences.close(7)
    assert readers(fences, [1, 2, 3]) == {8}
    assert fences.take_readers() == set(), "what was given in a step is asked for once"
    assert len(fences) == 1


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1, unique=True), st.booleans()), max_size=12))
def test_the_readers_of_a_block_end_with_the_last_job_that_reads_it(steps: list[tuple[list[int], bool]]) -> None:
    """Of several jobs that read a block, the last one is named: offloads are done in order."""
    fences, last_reader, open_jobs = Fences(), {}, {}
    for number, (blocks, closes) in enumerate(steps):
        fences.open(job(number, tuple(blocks)))
        open_jobs[number] = blocks
        last_reader.update(dict.fromkeys(blocks, number))
        if closes:
            first = min(open_jobs)
            fences.close(first)
            for block in open_jobs.pop(first):
                if last_reader.get(block) == first:
                    del last_reader[block]
        assert all(readers(fences, [block]) == {reader} for block, reader in last_reader.items())
        assert readers(fences, range(10)) == set(last_reader.values())
