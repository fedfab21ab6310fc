"""A store that breaks its contract fails the pages of its call, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvhoist.messages import StorageKey
from kvhoist.storage import Buffer, MemoryStore, Sealer, StorageIO

DEADLINE_S = 20


class Short(MemoryStore):
    """Answers for fewer pages than it was asked for."""

    def get(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[bytes | None]:
        return super().get(keys, blobs)[:-1]

    def exists(self, keys: Sequence[StorageKey]) -> list[bool]:
        return super().exists(keys)[:-1]

    def put(self, keys: Sequence[StorageKey], headers: Sequence[bytes], blobs: Sequence[Buffer]) -> list[bool]:
        return super().put(keys, headers, blobs)[:-1]


def test_a_store_that_does_not_answer_for_each_page_fails_and_counts_none(pages: Any) -> None:
    store = Short("64MiB")
    pages.put(store, range(3))
    io = StorageIO(store, Sealer(), num_threads=1)
    for future in (
        io.prefetch(pages.keys(range(3)), [memoryview(bytearray(pages.page_bytes)) for _ in range(3)]),
        io.lookup(pages.keys(range(3))),
        io.persist(pages.keys(range(3)), [pages.blob(i) for i in range(3)]),
    ):
        outcomes = future.result(DEADLINE_S)
        assert outcomes.failed_pages == (0, 1, 2)
        assert "did not answer for each page" in str(outcomes.error)
    stats = io.stats()
    assert stats.error_pages == 9
    assert (stats.prefetched_pages, stats.found_pages, stats.persisted_pages) == (0, 0, 0)
    assert stats.num_fences == 0, "each kind of call failed once"
    assert io.close()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Speechless(MemoryStore):
    def remove(self, keys: Sequence[StorageKey]) -> int:
        raise Unspeakable


def test_an_exception_that_cannot_be_told_does_not_end_the_thread(pages: Any) -> None:
    io = StorageIO(Speechless("64MiB"), Sealer(), num_threads=1)
    assert "Unspeakable" in str(io.drop(pages.keys([0])).result(DEADLINE_S).error)
    assert io.lookup(pages.keys([0])).result(DEADLINE_S).error == "1 x missing"
    assert io.close()
