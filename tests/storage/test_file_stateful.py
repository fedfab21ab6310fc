"""FileStore against a dict, with restarts, a second store on the folder, and evictions."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvhoist.messages import WHOLE, PageKey, StorageKey
from kvhoist.storage import FileStore, Sealer

IDS = st.integers(0, 23)
BATCHES = st.lists(IDS, max_size=8)
LENGTHS = (100, 4096, 9000)
NAMESPACES = (b"a" * 32, b"b" * 32)


def key(i: int) -> StorageKey:
    return StorageKey(PageKey(NAMESPACES[i % 2], i % 3, b"%03d" % i), WHOLE)


def blob(i: int) -> memoryview:
    return memoryview(bytes([i + 1]) * LENGTHS[i % 3])


class Roomy(RuleBasedStateMachine):
    """With room for all pages the store holds exactly what a dict would."""

    capacity = "4MiB"

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvhoist-stateful-"))
        self.sealer = Sealer()
        self.store = self.open()
        self.held: set[int] = set()

    def open(self) -> FileStore:
        return FileStore(self.folder, capacity=self.capacity, refresh_s=0.0)

    @rule(ids=BATCHES)
    def put(self, ids: list[int]) -> None:
        headers = [self.sealer.seal(key(i), blob(i)) for i in ids]
        kept = self.store.put([key(i) for i in ids], headers, [blob(i) for i in ids])
        self.expect_kept(ids, kept)
        self.held.update(i for i, ok in zip(ids, kept, strict=True) if ok)

    def expect_kept(self, ids: list[int], kept: list[bool]) -> None:
        assert kept == [True] * len(ids)

    @rule(ids=BATCHES)
    def get(self, ids: list[int]) -> None:
        self.expect_held(ids, self.served(self.store, ids))

    def served(self, store: FileStore, ids: list[int]) -> list[bool]:
        buffers = [memoryview(bytearray(len(blob(i)))) for i in ids]
        headers = store.get([key(i) for i in ids], buffers)
        for i, header, buffer in zip(ids, headers, buffers, strict=True):
            assert header is None or self.sealer.check(key(i), header, buffer) is None
            assert header is None or buffer == blob(i)
        return [header is not None for header in headers]

    def expect_held(self, ids: list[int], found: list[bool]) -> None:
        assert found == [i in self.held for i in ids]

    @rule(ids=BATCHES, act=st.sampled_from(["remove", "quarantine"]))
    def take_out(self, ids: list[int], act: str) -> None:
        method: Callable[[list[StorageKey]], int | None] = getattr(self.store, act)
        method([key(i) for i in ids])
        self.held -= set(ids)

    @rule(namespace=st.integers(0, 1))
    def remove_namespace(self, namespace: int) -> None:
        self.store.remove_namespace(NAMESPACES[namespace])
        self.held -= {i for i in self.held if i % 2 == namespace}

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.open()

    @rule(ids=BATCHES)
    def read_beside(self, ids: list[int]) -> None:
        reader = FileStore(self.folder, read_only=True)
        self.expect_held(ids, self.served(reader, ids))
        reader.close()

    @invariant()
    def adds_up(self) -> None:
        self.store.audit()
        self.expect_held(list(range(24)), self.store.exists([key(i) for i in range(24)]))

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


class Tight(Roomy):
    """With too little room the store holds a part of what a dict would, within capacity."""

    capacity = "80KiB"

    def expect_kept(self, ids: list[int], kept: list[bool]) -> None:
        assert len(kept) == len(ids)

    def expect_held(self, ids: list[int], found: list[bool]) -> None:
        assert all(i in self.held for i, here in zip(ids, found, strict=True) if here)

    @rule(ids=BATCHES)
    def read_beside(self, ids: list[int]) -> None:
        # An evicted page may still stand on disk until its slot is used again: right bytes, whoever reads them.
        reader = FileStore(self.folder, read_only=True)
        self.served(reader, ids)
        reader.close()

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.open()
        self.held |= {i for i in range(24) if self.store.exists([key(i)])[0]}

    @invariant()
    def stays_within_capacity(self) -> None:
        assert sum(path.stat().st_size for path in (self.folder / "segments").iterdir()) <= 80 << 10


TestRoomy = Roomy.TestCase
TestRoomy.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestTight = Tight.TestCase
TestTight.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
