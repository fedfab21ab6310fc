"""MooncakeStore and other processes: a master that dies, hangs or restarts, peers that do, and caches that share."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mooncake_support import DEADLINE_S, Master, freeze, poll, run_python, running_master
from support import PAGE_TOKENS, TinyEngine

from kvhoist.config import CacheConfig
from kvhoist.errors import ClosedError, KvhoistError, StoreUnavailableError
from kvhoist.storage import MooncakeStore, open_store
from kvhoist.storage.mooncake import client as client_module

PROMPT = list(range(100, 100 + 10 * PAGE_TOKENS + 1))
OUTAGE_S = 10.0
"""Beyond what any call may take while the master is away: the engine's own tries take about 4.5 s."""


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


def test_once_a_restarted_master_has_answered_no_call_fails(mortal: Master, pages: Any) -> None:
    """The engine keeps a connection for each call that was under way at once, all of them dead now."""
    store = open_store(mortal.url())
    assert isinstance(store, MooncakeStore)
    pages.put(store, range(8))
    stop = threading.Event()

    def read_on() -> None:
        while not stop.is_set():
            pages.read(store, range(8))

    readers = [threading.Thread(target=read_on) for _ in range(8)]
    for reader in readers:
        reader.start()
    poll(lambda: store.stats().get_pages > 400, "eight readers to read at once")
    stop.set()
    for reader in readers:
        reader.join(DEADLINE_S)
    mortal.kill()
    with pytest.raises(StoreUnavailableError):
        store.exists(pages.keys([0]))
    mortal.start()

    failures: list[str] = []

    def answers() -> bool:
        try:
            return store.exists(pages.keys([0])) == [False]
        except StoreUnavailableError as error:
            failures.append(str(error))
            return False

    poll(answers, "the store to find its master again")
    assert [failure for failure in failures if "cannot be reached" not in failure] == [], "it was called, and failed"
    for _ in range(40):
        assert store.exists(pages.keys(range(8))) == [False] * 8
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


def test_the_engines_threads_are_not_bound_to_the_core_of_the_thread_that_opens_it(
    mortal: Master, one_core: tuple[int, set[int]]
) -> None:
    before = set(os.listdir("/proc/self/task"))
    store = open_store(mortal.url())
    threads = set(os.listdir("/proc/self/task")) - before
    cores = [found for task in threads if (found := _cores_of(task))]
    store.close()
    assert len(cores) > 5
    assert [found for found in cores if found != one_core[1]] == []


def _cores_of(task: str) -> set[int]:
    with contextlib.suppress(ProcessLookupError):  # it has ended: not all of them live long
        return os.sched_getaffinity(int(task))
    return set()


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
        freeze(peer)
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
