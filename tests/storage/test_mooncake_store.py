"""MooncakeStore on a real mooncake_master: damage, secrets, memory, notes, one client a process."""

from __future__ import annotations

import builtins
import os
from typing import Any

import pytest
from forks import status_in_fork
from mooncake_support import DEADLINE_S, Master
from support import TinyEngine

from kvhoist.errors import ClosedError, MissingDependencyError, StorageError, StoreUnavailableError
from kvhoist.storage import MooncakeOptions, MooncakeStore, Sealer, StorageIO, open_store
from kvhoist.storage.mooncake.notes import NUM_SLOTS
from kvhoist.storage.mooncake.store import name_of


@pytest.fixture
def store(mooncake: MooncakeStore) -> MooncakeStore:
    engine(mooncake).remove_all(True)
    return mooncake


def engine(store: MooncakeStore) -> Any:
    """The engine's client under the store, with which anybody else could do this too."""
    return store._client.call(lambda engine: engine)


def fetch(store: MooncakeStore, pages: Any, ids: range, sealer: Sealer | None = None) -> list[str]:
    """Prefetch as the data plane does and return each page's reason, "good" where there is none."""
    io = StorageIO(store, sealer or pages.sealer, num_threads=1)
    buffers = [memoryview(bytearray(pages.page_bytes)) for _ in ids]
    outcomes = io.prefetch(pages.keys(ids), buffers).result(DEADLINE_S)
    assert io.close()
    for i, reason, buffer in zip(ids, outcomes.reasons, buffers, strict=True):
        assert reason is not None or buffer == pages.blob(i), "wrong bytes passed the check"
    return ["good" if reason is None else reason for reason in outcomes.reasons]


def test_one_client_a_process_while_options_are_equal(store: MooncakeStore, master: Master, pages: Any) -> None:
    twin = open_store(master.url())
    other = open_store(master.url(segment="0"))
    assert isinstance(twin, MooncakeStore)
    assert isinstance(other, MooncakeStore)
    assert twin._client is store._client
    assert other._client is not store._client
    assert pages.put(other, [1]) == [True]
    twin.close()
    other.close()
    assert pages.read(store, [1]) == ["good"]


def test_damaged_foreign_and_misplaced_records_are_refused_and_taken_out(store: MooncakeStore, pages: Any) -> None:
    assert all(pages.put(store, range(6)))
    record, flipped = (bytearray(engine(store).get(name_of(pages.key(i)))) for i in (0, 1))
    assert record[256:] == pages.blob(0)
    flipped[700] ^= 1
    hostile = {1: flipped, 2: record, 3: record[:-1], 4: record + b"x", 5: os.urandom(len(record))}
    words = ("blob damaged", "misplaced", "truncated", "truncated", "foreign")
    for i, data in hostile.items():
        assert engine(store).upsert(name_of(pages.key(i)), bytes(data)) == 0
    reasons = fetch(store, pages, range(6))
    assert reasons[0] == "good"
    for reason, word in zip(reasons[1:], words, strict=True):
        assert word in reason
    assert store.exists(pages.keys(range(6))) == [True] + [False] * 5
    assert all(pages.put(store, range(6)))
    assert fetch(store, pages, range(6)) == ["good"] * 6


def test_pages_of_who_has_not_the_secret_are_refused(store: MooncakeStore, pages_of: Any) -> None:
    ours, theirs = Sealer(b"s" * 32), Sealer(b"t" * 32)
    pages = pages_of(sealer=theirs)
    pages.put(store, [0])
    pages_of().put(store, [1])
    pages_of(sealer=ours).put(store, [2])
    reasons = fetch(store, pages, range(3), ours)
    assert "another secret" in reasons[0]
    assert "unsigned" in reasons[1]
    assert reasons[2] == "good"


def test_registered_memory_is_not_copied(store: MooncakeStore, pages_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages larger than what the pool could lend pass where they lie in registered memory, and only there."""
    pages = pages_of(page_bytes=5 << 20)
    arena = memoryview(bytearray(2 * pages.page_bytes))
    arena[: pages.page_bytes] = pages.blob(1)
    halves = [arena[: pages.page_bytes], arena[pages.page_bytes :]]
    put = [[pages.key(1)], [pages.sealer.seal(pages.key(1), halves[0])], [halves[0]]]
    with pytest.raises(StorageError, match="Raise the option bounce"):
        store.put(*put)
    store.register(arena)
    assert store.put(*put) == [True]
    (header,) = store.get([pages.key(1)], [halves[1]])
    assert header is not None
    assert pages.sealer.check(pages.key(1), header, halves[1]) is None
    store.unregister(arena)
    with pytest.raises(StorageError, match="Raise the option bounce"):
        store.get([pages.key(1)], [halves[1]])


def test_a_full_store_drops_and_counts(store: MooncakeStore, master: Master, pages_of: Any) -> None:
    pages = pages_of(page_bytes=3 << 20)
    before = store.stats()
    kept = [pages.put(store, [i])[0] for i in range(40)]
    after = store.stats()
    assert False in kept
    assert after.dropped_pages - before.dropped_pages == kept.count(False)
    assert after.put_pages - before.put_pages == kept.count(True)
    assert set(fetch(store, pages, range(40))) <= {"good", "missing"}


def test_notes_of_strangers_and_a_full_table_cost_an_explanation_only(store: MooncakeStore) -> None:
    strange = [b"\xff\xfe", b"[]", b'{"namespace": "zz", "fields": {}}', b"x" * 100_000, b"[" * 60_000]
    strange += [b'{"namespace": "abcd", "fields": {"a": "b"}}', b'{"namespace": "%s", "fields": 3}' % (b"ab" * 32)]
    for slot, junk in enumerate(strange):
        assert engine(store).put(f"kvhoist1-note/{slot}", junk) == 0
    assert store.namespaces() == {}
    digests = [bytes([i]) * 32 for i in range(NUM_SLOTS - len(strange))]
    for digest in digests:
        store.note_namespace(digest, {"model": digest.hex()})
    assert store.namespaces() == {digest: {"model": digest.hex()} for digest in digests}
    with pytest.raises(StorageError, match="no room to note"):
        store.note_namespace(b"\xaa" * 32, {"model": "one too many"})


def test_without_the_engines_package_the_message_says_what_to_install(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_mooncake(name: str, *rest: Any) -> Any:
        if name == "mooncake":
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_mooncake)
    with pytest.raises(MissingDependencyError, match=r"libibverbs.*kvhoist\[mooncake\]"):
        MooncakeStore(MooncakeOptions(master.address, segment=0, timeout_s=9))


def test_a_store_whose_master_is_not_there_does_not_open() -> None:
    with pytest.raises(StoreUnavailableError, match="Start mooncake_master there"):
        open_store("mooncake:127.0.0.1:9?timeout_s=2")


def test_a_child_of_the_process_cannot_use_its_parents_client(store: MooncakeStore, pages: Any) -> None:
    pages.put(store, [1])

    def be_refused() -> int:
        try:
            store.exists(pages.keys([1]))
        except ClosedError:
            return 7
        return 1

    assert status_in_fork(be_refused) == 7


def test_a_cache_registers_its_arena_and_takes_it_back(store: MooncakeStore) -> None:
    with TinyEngine(device_pages=16, host_pages=16, store=store) as here:
        region = here.cache._binding.arena.region
        assert store._client.regions.holds(region.address, region.num_bytes)
    assert not store._client.regions.holds(region.address, 1)
