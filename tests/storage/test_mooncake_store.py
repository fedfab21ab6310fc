"""MooncakeStore on a real mooncake_master: sharing, damage, secrets, memory; a master that dies, hangs or restarts."""

from __future__ import annotations

import builtins
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mooncake_support import DEADLINE_S, Master, poll, run_python, running_master
from support import PAGE_TOKENS, TinyEngine

from kvhoist.config import CacheConfig
from kvhoist.errors import ClosedError, KvhoistError, MissingDependencyError, StorageError, StoreUnavailableError
from kvhoist.storage import MooncakeOptions, MooncakeStore, Sealer, StorageIO, open_store
from kvhoist.storage.mooncake import client as client_module
from kvhoist.storage.mooncake.notes import NUM_SLOTS
from kvhoist.storage.mooncake.store import name_of

PROMPT = list(range(100, 100 + 10 * PAGE_TOKENS + 1))
OUTAGE_S = 10.0
"""Beyond what any call may take while the master is away: the engine's own tries take about 4.5 s."""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with running_master(tmp_path_factory.mktemp("master")) as master:
        yield master


@pytest.fixture(scope="module")
def only_store(master: Master) -> Iterator[MooncakeStore]:
    store = open_store(master.url())
    assert isinstance(store, MooncakeStore)
    yield store
    store.close()


@pytest.fixture
def store(only_store: MooncakeStore) -> MooncakeStore:
    engine(only_store).remove_all(True)
    return only_store


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
    for slot, junk in ((0, b"\xff\xfe"), (1, b"[]"), (2, b'{"namespace": "zz", "fields": {}}'), (3, b"x" * 100_000)):
        assert engine(store).put(f"kvhoist1-note/{slot}", junk) == 0
    assert store.namespaces() == {}
    digests = [bytes([i]) * 32 for i in range(NUM_SLOTS - 4)]
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
    pid = os.fork()
    if pid == 0:
        try:
            store.exists(pages.keys([1]))
        except ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


# -- a master of its own for each, which is killed, stopped and started ----------------------------------------------


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Master]:
    with running_master(tmp_path) as master:
        yield master


def served(store: MooncakeStore, pages: Any) -> bool:
    """Whether a page can be put and read."""
    try:
        return pages.put(store, [77]) == [True] and pages.read(store, [77]) == ["good"]
    except StoreUnavailableError:
        return False


def test_a_master_that_restarts_is_found_again_and_calls_fail_quickly_meanwhile(mortal: Master, pages: Any) -> None:
    store = open_store(mortal.url())
    assert isinstance(store, MooncakeStore)
    pages.put(store, range(4))
    num_threads = len(os.listdir("/proc/self/task"))
    mortal.kill()
    begun = time.monotonic()
    for _ in range(200):
        for act in (
            lambda: pages.put(store, range(8)),
            lambda: pages.read(store, range(4)),
            lambda: store.exists(pages.keys(range(4))),
            lambda: store.remove(pages.keys(range(4))),
            lambda: store.remove_namespace(pages.namespace),
            lambda: store.quarantine(pages.keys([1])),
            lambda: store.note_namespace(pages.namespace, {}),
            lambda: store.namespaces(),
        ):
            with pytest.raises(StoreUnavailableError, match="Mooncake master"):
                act()
    assert time.monotonic() - begun < OUTAGE_S, "1600 calls in an outage"
    store.stats()
    mortal.start()
    poll(lambda: served(store, pages), "the store to find its master again")
    assert pages.read(store, range(4)) == ["missing"] * 4, "the master remembers nothing"
    assert all(pages.put(store, range(4)))
    assert pages.read(store, range(4)) == ["good"] * 4
    assert len(os.listdir("/proc/self/task")) <= num_threads + 4, "1600 failed calls left threads behind"
    store.close()


def test_a_master_that_hangs_costs_one_deadline_and_is_found_again(mortal: Master, pages: Any) -> None:
    store = open_store(mortal.url(timeout_s=2))
    assert isinstance(store, MooncakeStore)
    pages.put(store, range(4))
    mortal.freeze()
    try:
        with pytest.raises(StoreUnavailableError, match="expected an answer within 2 s"):
            pages.read(store, range(4))
        with pytest.raises(StoreUnavailableError, match="tried again in"):
            pages.read(store, range(4))
    finally:
        mortal.thaw()
    poll(lambda: served(store, pages), "the store to find its master again")
    assert pages.read(store, range(4)) == ["good"] * 4
    store.close()


def test_close_ends_the_engine_and_waits_for_calls_under_way(mortal: Master, pages_of: Any) -> None:
    """The engine crashes the process when it is called after its close."""
    pages = pages_of(page_bytes=1 << 20)
    store = open_store(mortal.url())
    assert isinstance(store, MooncakeStore)
    pages.put(store, range(8))
    outcomes: list[type[BaseException] | None] = []

    def read_on() -> None:
        while True:
            try:
                pages.read(store, range(8))
            except KvhoistError as error:
                outcomes.append(type(error))
                return

    readers = [threading.Thread(target=read_on) for _ in range(4)]
    for reader in readers:
        reader.start()
    store.close()
    for reader in readers:
        reader.join(DEADLINE_S)
    assert outcomes == [ClosedError] * 4
    assert (os.getpid(), store._options) not in client_module._clients


LENDER = """
import sys
from kvhoist.storage import open_store
store = open_store(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_peer_that_hangs_or_dies_costs_its_pages_only(mortal: Master, pages: Any) -> None:
    """The peer is the only one who lends memory."""
    peer = run_python(LENDER, mortal.url())
    assert peer.stdin is not None
    assert peer.stdout is not None
    try:
        assert peer.stdout.readline() == "ready\n"
        store = open_store(mortal.url(segment="0"))
        assert all(pages.put(store, range(4)))
        assert pages.read(store, range(4)) == ["good"] * 4
        peer.send_signal(signal.SIGSTOP)
        assert pages.read(store, [0]) == ["missing"]
        assert store.stats().error_pages == 1
        assert store.exists(pages.keys([99])) == [False], "the store itself is not fenced"
        peer.send_signal(signal.SIGCONT)
        poll(lambda: pages.read(store, [0]) == ["good"], "the peer to answer again")
        peer.kill()
        poll(lambda: pages.read(store, range(4)) == ["missing"] * 4, "the pages to be gone")
        store.close()
    finally:
        peer.kill()
        peer.wait()


def test_a_process_may_end_without_closing_its_store(mortal: Master) -> None:
    peer = run_python(LENDER, mortal.url())
    assert peer.communicate("", timeout=DEADLINE_S)[0] == "ready\n"
    assert peer.returncode == 0


SHARER = """
import sys
sys.path[:0] = sys.argv[3:]
from support import TinyEngine
from kvhoist.config import CacheConfig
address, secret = sys.argv[1], sys.argv[2].encode()
with TinyEngine(device_pages=16, host_pages=16, store=address, config=CacheConfig(store_secret=secret)) as engine:
    print("ready", flush=True)
    for line in sys.stdin:
        engine.scribble()
        print(engine.run(eval(line)), flush=True)
        assert engine.cache.flush(30.0)
        print("flushed", flush=True)
"""


def test_two_caches_in_two_processes_share_what_one_of_them_computed(mortal: Master) -> None:
    """Both ways, byte for byte (each engine checks what it gets), but not with a process that has another secret."""
    tests = str(Path(__file__).parents[1])
    peers = [run_python(SHARER, mortal.url(), secret, tests) for secret in ("one" * 8, "two" * 8)]

    def ask(peer: Any, tokens: list[int]) -> str:
        peer.stdin.write(f"{tokens}\n")
        peer.stdin.flush()
        answer: str = peer.stdout.readline().strip()
        assert peer.stdout.readline().strip() == "flushed"
        return answer

    try:
        assert [peer.stdout.readline().strip() for peer in peers if peer.stdout] == ["ready"] * 2
        config = CacheConfig(store_secret=b"one" * 8)
        with TinyEngine(device_pages=16, host_pages=16, store=mortal.url(), config=config) as here:
            assert ask(peers[0], PROMPT) == "{'device': 0, 'host': 0, 'storage': 0}"
            assert here.run(PROMPT) == {"device": 0, "host": 0, "storage": 40}
            other = [token + 1000 for token in PROMPT]
            here.run(other)
            assert here.cache.flush(DEADLINE_S)
            assert ask(peers[0], other) == "{'device': 0, 'host': 0, 'storage': 40}"
            assert ask(peers[1], other) == "{'device': 0, 'host': 0, 'storage': 0}"
            store_stats = here.cache.stats().store
            assert store_stats is not None
            assert store_stats.get_pages == store_stats.put_pages == 10
    finally:
        for peer in peers:
            if peer.stdin:
                peer.stdin.close()
        codes = [peer.wait(DEADLINE_S) for peer in peers]
    assert codes == [0, 0]


def test_a_cache_registers_its_arena_and_takes_it_back(store: MooncakeStore) -> None:
    with TinyEngine(device_pages=16, host_pages=16, store=store) as here:
        region = here.cache._binding.arena.region
        assert store._client.regions.holds(region.address, region.num_bytes)
    assert not store._client.regions.holds(region.address, 1)
