"""A store that can move pages without a copy is told where SGLang's host pools lie, before any page is moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from sglang_rig import mha_pool, mla_pool, names, slots

from kvhoist.messages import StorageKey
from kvhoist.storage import Buffer, MemoryStore
from kvhoist.storage.base import address_of


class Told(MemoryStore):
    """Remembers what was registered, and where blobs lay."""

    def __init__(self) -> None:
        super().__init__("64MiB")
        self.registered: list[range] = []
        self.blobs: list[range] = []

    def register(self, memory: Buffer) -> None:
        self.registered.append(_place(memory))

    def put(self, keys: Sequence[StorageKey], headers: Sequence[bytes], blobs: Sequence[Buffer]) -> list[bool]:
        self.blobs += [_place(blob) for blob in blobs]
        return super().put(keys, headers, blobs)


def _place(memory: Buffer) -> range:
    start = address_of(memory)
    return range(start, start + len(memory))


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
@pytest.mark.parametrize("make", [mha_pool, mla_pool])
def test_pages_that_are_used_in_place_lie_in_registered_memory(
    make: Callable[..., Any], layout: str, backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Told()
    monkeypatch.setattr("kvhoist.adapters.sglang.storage.open_store", lambda _: store)
    made = backend(make(layout))
    assert made.batch_set_v1(names(2), slots([0, 1])) == [True] * 2
    in_place = layout != "layer_first"
    assert len(store.registered) == in_place
    for blob in store.blobs if in_place else []:
        assert any(blob.start in memory and blob.stop - 1 in memory for memory in store.registered)
    assert store.blobs
