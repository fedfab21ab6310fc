"""The engine's client: one a process and set of options, shared by stores, called only while open and reachable."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvhoist.affinity import on_any_core
from kvhoist.errors import ClosedError, MissingDependencyError, StoreUnavailableError
from kvhoist.settings import set_where_unset
from kvhoist.storage.mooncake.master import MasterWatch
from kvhoist.storage.mooncake.memory import Pool, Regions
from kvhoist.storage.mooncake.options import MooncakeOptions

OK = 0
NO_ROOM = -200
BAD_LENGTH = (-600, -800)  # the object is longer than the buffers, or shorter (which is a failed transfer)
NOT_READY = -703
NOT_FOUND = -704
_RPC_FAILURES = range(-999, -899)
_LOCAL_BUFFER_BYTES = 16 << 20
_MOST_CONNECTIONS, _MOST_CONNECTIONS_S = 256, 1.0
_clients: dict[tuple[int, MooncakeOptions], Client] = {}
_clients_lock = threading.Lock()


class Client:
    """A `MooncakeDistributedStore` that is set up. Made by `open_client`, given back by `release`. Thread-safe.

    Every call ends: the engine waits `timeout_s` for the master and for peers, and the memory of a call is the
    engine's until then, so no call is left behind. `pool` and what was registered is memory that the engine knows.
    """

    def __init__(self, options: MooncakeOptions) -> None:
        module = _import_engine()
        self.options = options
        self.regions = Regions()
        self.num_users = 1
        self._pid = os.getpid()
        self._closed = False
        self._running = 0
        self._idle = threading.Condition()
        self._watch = MasterWatch(options.master_address())
        timeout_s = str(options.timeout_s)
        set_where_unset(
            {
                "MC_RPC_TIMEOUT_MS": f"{timeout_s}000",
                "MC_TCP_STATUS_TIMEOUT_SEC": timeout_s,
                "MC_TCP_PROGRESS_TIMEOUT_SEC": timeout_s,
                "MC_SLICE_TIMEOUT": timeout_s,
            }
        )
        self._engine = module.MooncakeDistributedStore()
        self.replicate = _replicate(module, options)
        self.pool = Pool(int(options.bounce))
        try:
            self._set_up()
        except BaseException:
            self._watch.close()
            self.pool.close()
            raise

    def call(self, act: Callable[[Any], Any]) -> Any:
        """Return `act(engine)`. Raises ClosedError, and StoreUnavailableError at once while the master is away."""
        with self._in_use():
            self._watch.check(self._use_up_connections)
            return act(self._engine)

    def codes(self, act: Callable[[Any], Sequence[int]]) -> list[int]:
        """As `call`, for calls that answer one number a key. Raises StoreUnavailableError where any of them says that
        the master did not answer."""
        codes = list(self.call(act))
        if any(code in _RPC_FAILURES for code in codes):
            self._watch.failed()
            raise StoreUnavailableError(
                "the Mooncake master did not answer",
                got=f"{self.options.master}, the engine's code {min(codes)}",
                expected=f"an answer within {self.options.timeout_s} s",
                remedy="Nothing to do here where it is restarting: the store finds it again by itself.",
            )
        self._watch.answered()
        return codes

    def held(self, names: Sequence[str]) -> list[bool]:
        """Ask the master which objects are there."""
        return [code == 1 for code in self.codes(lambda engine: engine.batch_is_exist(list(names)))]

    def register(self, start: int, num_bytes: int) -> bool:
        """Make memory known to the engine; False where it refuses."""
        with self._in_use():
            if not self.regions.add(start, num_bytes):
                return True
            if self._engine.register_buffer(start, num_bytes) == OK:
                return True
            self.regions.discard(start, num_bytes)
            return False

    def unregister(self, start: int, num_bytes: int) -> None:
        """Take one registration back; the engine forgets the memory with the last."""
        with self._in_use():
            if self.regions.discard(start, num_bytes):
                self._engine.unregister_buffer(start)

    def close(self) -> None:
        """Wait for the calls under way and end the engine's threads; in a forked child, which has none, do nothing."""
        if os.getpid() != self._pid:
            return
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: not self._running)
        self._watch.close()
        self._engine.close()
        self.pool.close()

    def _use_up_connections(self) -> None:
        """Have the engine's idle connections to a master that has restarted fail now: it keeps as many as there were
        calls at once, and one call after the other would fail on each."""
        deadline = time.monotonic() + _MOST_CONNECTIONS_S
        for _ in range(_MOST_CONNECTIONS):
            self._engine.batch_is_exist(["kvhoist1-is-it-there"])
            if time.monotonic() > deadline:
                return

    def _set_up(self) -> None:
        options = self.options
        code = self._engine.setup(
            options.host or self._watch.local_host,
            options.metadata,
            int(options.segment),
            _LOCAL_BUFFER_BYTES,
            options.protocol,
            options.devices,
            options.master,
        )
        if code == OK:
            code = self._engine.register_buffer(self.pool.start, self.pool.num_bytes)
        if code != OK:
            self._engine.close()
            raise StoreUnavailableError(
                "the Mooncake client could not be set up",
                got=f"the engine's code {code} for {options}",
                remedy="See what the engine logged above; try protocol=tcp, another host= or a smaller segment=.",
            )

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """The engine crashes when it is called after its close, and does not survive a fork."""
        with self._idle:
            if self._closed or os.getpid() != self._pid:
                raise ClosedError("this Mooncake client is closed, or of another process", remedy="Open a new store.")
            self._running += 1
        try:
            yield
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()


def open_client(options: MooncakeOptions) -> Client:
    """Return this process's client for `options`, made where there is none. Raises MissingDependencyError,
    StoreUnavailableError."""
    key = (os.getpid(), options)
    with _clients_lock:
        client = _clients.get(key)
        if client is None:
            with on_any_core():  # the engine starts its threads here
                client = Client(options)
            _clients[key] = client
        else:
            client.num_users += 1
        return client


def release(client: Client) -> None:
    """Give a client back; the last to do so closes it."""
    with _clients_lock:
        client.num_users -= 1
        if client.num_users:
            return
        _clients.pop((os.getpid(), client.options), None)
        client.close()


def _import_engine() -> Any:
    try:
        from mooncake import store
    except ImportError as error:
        raise MissingDependencyError(
            "the Mooncake client cannot be imported",
            got=str(error),
            remedy="Install kvhoist[mooncake] (without CUDA: mooncake-transfer-engine-non-cuda) and, on Debian, "
            "libibverbs1.",
        ) from error
    return store


def _replicate(module: Any, options: MooncakeOptions) -> Any:
    config = module.ReplicateConfig()
    config.replica_num = options.replicas
    if options.soft_pin_s > 0:
        config.soft_pin_action = module.SoftPinAction.ENABLE
        config.soft_pin_ttl_ms = int(options.soft_pin_s * 1000)
    return config
