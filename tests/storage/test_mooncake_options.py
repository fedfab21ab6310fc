"""What a mooncake address says, and what of Mooncake needs no master: the watch over it, names, the bounce pool."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvhoist.errors import ConfigError, StorageError, StoreUnavailableError
from kvhoist.messages import WHOLE, PageKey, StorageKey
from kvhoist.storage import MooncakeOptions, open_store
from kvhoist.storage.mooncake.master import FIRST_DELAY_S, MAX_DELAY_S, MasterWatch
from kvhoist.storage.mooncake.memory import Pool, Regions
from kvhoist.storage.mooncake.store import name_of


def test_an_address_gives_all_options() -> None:
    options = MooncakeOptions.from_address(
        "//[::1]:50051",
        {
            "metadata": "http://a:8080/metadata",
            "host": "10.0.0.7",
            "protocol": "rdma",
            "devices": "mlx5_0,mlx5_1",
            "segment": "0",
            "bounce": "2MiB",
            "replicas": "2",
            "soft_pin_s": "1.5",
            "timeout_s": "7",
        },
    )
    assert options.master_address() == ("::1", 50051)
    assert (options.segment, options.bounce, options.replicas) == (0, 2 << 20, 2)
    assert (options.soft_pin_s, options.timeout_s, options.devices) == (1.5, 7, "mlx5_0,mlx5_1")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mooncake:", "expected host:port"),
        ("mooncake:host", "expected host:port"),
        ("mooncake:host:0", "expected host:port"),
        ("mooncake::50051", "expected host:port"),
        ("mooncake:host:50051?colour=red", "got colour; valid choices: metadata, host, protocol"),
        ("mooncake:host:50051?protocol=smoke", "valid choices: tcp, rdma"),
        ("mooncake:host:50051?segment=-1", "segment is not a usable number of bytes"),
        ("mooncake:host:50051?bounce=1KiB", "expected at least 1MiB"),
        ("mooncake:host:50051?replicas=two", "replicas is not a number"),
        ("mooncake:host:50051?replicas=0", "replicas is out of range"),
        ("mooncake:host:50051?timeout_s=0", "timeout_s is out of range"),
        ("mooncake:host:50051?soft_pin_s=-1", "soft_pin_s is out of range"),
        ("mooncake:host:50051?soft_pin_s=nan", "soft_pin_s is out of range"),
    ],
)
def test_an_address_that_cannot_work_says_why(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(target)


def test_names_are_plain_text_whatever_the_key() -> None:
    hostile = StorageKey(PageKey(b"\n" * 32, 3, b"/../.*\xff"), WHOLE)
    assert name_of(hostile) == f"kvhoist1/{'0a' * 32}/3/2f2e2e2f2e2aff/0-1"
    with pytest.raises(ConfigError, match="cannot hold"):
        name_of(StorageKey(PageKey(b"short", 0, b"x"), WHOLE))


class Listener:
    """A server that takes connections and says nothing, on one port all along."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.taken: list[socket.socket] = []
        self.port = 0
        self.start()

    def start(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", self.port))
        self.port = self.socket.getsockname()[1]

    def stop(self) -> None:
        """End as a process does: what waits in the queue is closed too."""
        if self.socket is not None:
            self.socket.setblocking(False)
            while True:
                try:
                    self.taken.append(self.socket.accept()[0])
                except BlockingIOError:
                    break
            self.socket.close()
            self.socket = None
        for one in self.taken:
            one.close()
        self.taken.clear()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.stop()


def test_the_watch_backs_off_within_bounds_and_comes_back(listener: Listener) -> None:
    now = [100.0]
    watch = MasterWatch(("127.0.0.1", listener.port), clock=lambda: now[0])
    watch.check()
    assert watch.local_host == "127.0.0.1"
    listener.stop()
    waits = []
    for _ in range(9):
        with pytest.raises(StoreUnavailableError, match="Connection refused"):
            watch.check()
        with pytest.raises(StoreUnavailableError, match="tried again in"):
            watch.check()
        begun = now[0]
        while True:  # step until somebody may try again
            now[0] += FIRST_DELAY_S / 2
            try:
                watch.check()
            except StoreUnavailableError as error:
                if "tried again in" not in str(error):
                    break
        waits.append(now[0] - begun)
        now[0] += 2 * MAX_DELAY_S
    assert waits[0] <= 3 * FIRST_DELAY_S < waits[2] < max(waits) <= 1.1 * MAX_DELAY_S
    listener.start()
    now[0] += MAX_DELAY_S
    watch.check()
    watch.answered()
    watch.failed()
    with pytest.raises(StoreUnavailableError, match=r"tried again in 0\.1 s"):
        watch.check()
    now[0] += FIRST_DELAY_S
    watch.check()
    watch.close()


def test_the_pool_lends_bytes_that_nobody_else_has() -> None:
    pool = Pool(1 << 16)

    def work(seed: int) -> int:
        for i in range(300):
            with pool.piece(1 + (seed * 7919 + i * 104729) % pool.max_piece_bytes, 60.0) as (start, view):
                assert pool.start <= start <= pool.start + pool.num_bytes - len(view)
                view[:] = bytes([seed]) * len(view)
                assert bytes(view) == bytes([seed]) * len(view)
        return seed

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(work, range(6))) == list(range(6))
    half = pool.max_piece_bytes
    with (
        pool.piece(half, 0),
        pool.piece(half, 0),
        pytest.raises(StorageError, match="no bounce memory came free"),
        pool.piece(1, 0),
    ):
        pass
    with pytest.raises(StorageError, match="Raise the option bounce"), pool.piece(pool.max_piece_bytes + 1, 0):
        pass
    pool.close()


def test_regions_hold_what_lies_inside_as_often_as_registered() -> None:
    regions = Regions()
    assert regions.add(1000, 100)
    assert not regions.add(1000, 100)
    inside: list[tuple[Any, ...]] = [(1000, 100), (1099, 1)]
    assert all(regions.holds(*span) for span in inside)
    assert not any(regions.holds(*span) for span in [(999, 2), (1099, 2), (0, 5000)])
    assert not regions.discard(1000, 100)
    assert regions.holds(1000, 100)
    assert regions.discard(1000, 100)
    assert not regions.holds(1000, 100)
    assert not regions.discard(1000, 100)
