"""The suite for stores' authors catches stores that break their contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvhoist.messages import StorageKey
from kvhoist.storage import Buffer, MemoryStore
from kvhoist.testing import Pages
from kvhoist.testing.store_suite import StoreSuite


class Replaces(MemoryStore):
    def put(self, keys: Sequence[StorageKey], headers: Sequence[bytes], blobs: Sequence[Buffer]) -> list[bool]:
        self.remove(keys)
        return super().put(keys, headers, blobs)


class Forgets(MemoryStore):
    def put(self, keys: Sequence[StorageKey], headers: Sequence[bytes], blobs: Sequence[Buffer]) -> list[bool]:
        return [*super().put(keys[:500], headers[:500], blobs[:500]), *[True] * len(keys[500:])]


class MixesUp(MemoryStore):
    """As a client does that fills one buffer of a key that is asked for twice."""

    def get(self, keys: Sequence[StorageKey], blobs: Sequence[Buffer]) -> list[bytes | None]:
        headers = super().get(keys, blobs)
        for i, key in enumerate(keys):
            if key in keys[:i]:
                blobs[i][:] = bytes(len(blobs[i]))
        return headers


class KeepsAll(MemoryStore):
    def remove_namespace(self, namespace: bytes) -> int:
        return 4


class StaysOpen(MemoryStore):
    def close(self) -> None:
        pass


SUITE = StoreSuite()


@pytest.mark.parametrize(
    ("store", "test"),
    [
        (Replaces(), lambda store: SUITE.test_a_key_that_is_held_is_not_replaced(store, Pages())),
        (Forgets(), SUITE.test_a_batch_of_many_pages_comes_back),
        (MixesUp(), lambda store: SUITE.test_a_key_twice_in_one_batch_is_kept_once(store, Pages())),
        (KeepsAll(), lambda store: SUITE.test_a_namespace_is_removed_without_the_others(store, Pages())),
        (KeepsAll(), SUITE.test_hostile_keys_are_kept_apart),
    ],
)
def test_a_store_that_breaks_its_contract_fails(store: MemoryStore, test: Callable[[MemoryStore], None]) -> None:
    with pytest.raises(AssertionError):
        test(store)
    test(MemoryStore())


def test_a_store_that_stays_open_fails(tmp_path: Path) -> None:
    suite = StoreSuite()
    suite.open = lambda place: StaysOpen()  # type: ignore[method-assign]
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        suite.test_a_closed_store_says_so(tmp_path, Pages())
