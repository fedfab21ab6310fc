"""A store in use by one rank: open, told of the host tier's memory, behind an I/O pool."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from kvhoist.affinity import start
from kvhoist.memory.arena import HostArena
from kvhoist.storage.base import Buffer, Store, register_memory, unregister_memory
from kvhoist.storage.open import open_storage_io, open_store

_FOR_EVER_S = 1e9
_MOMENT_S = 0.5


class AttachedStore:
    """Owns the I/O pool, the registration of the arena's memory with the store and, where `target` is an address, the
    store. `name` is that address, or the store's own name. Thread-safe.

    `failed` is called with what the store could not do, in the handler of its exception. Raises what opening the store
    and registering memory raise, having kept nothing.
    """

    def __init__(
        self,
        target: Store | str,
        arena: HostArena,
        *,
        num_threads: int,
        max_queued_pages: int | None,
        secret: bytes | None = None,
        failed: Callable[[str], object],
    ) -> None:
        self.store = open_store(target)
        self.owned = isinstance(target, str)
        self.name = target if isinstance(target, str) else self.store.name
        self.persists = not getattr(self.store, "read_only", False)
        self._failed = failed
        self._ending: threading.Thread | None = None
        self._let_go = threading.Event()
        self._lock = threading.Lock()
        with contextlib.ExitStack() as undo:
            if self.owned:
                undo.callback(self.store.close)
            self._memory: Buffer | None = arena.buffer.data  # which stays mapped as long as the store may use it
            register_memory(self.store, self._memory)
            undo.callback(unregister_memory, self.store, self._memory)
            self.io = open_storage_io(
                self.store, arena.num_pages, num_threads=num_threads, max_queued_pages=max_queued_pages, secret=secret
            )
            undo.pop_all()

    def close(self, *, drain: bool, timeout_s: float) -> bool:
        """Finish (or cancel) what is under way, let the store forget the memory, and close it if it is owned.

        Returns whether the memory is no longer the store's after `timeout_s` (and a moment for threads to end). Where a
        call of the store hangs, a thread waits for it to return and does the rest then. Idempotent.
        """
        deadline = time.monotonic() + timeout_s
        # A callback of the I/O may close it, in a thread that no other may wait for then.
        ended = self.io.close(drain=drain, timeout_s=timeout_s)
        with self._lock:
            if self._ending is None:
                self._ending = threading.Thread(
                    target=self._end, args=(ended,), name="kvhoist-store-close", daemon=True
                )
                start(self._ending)
        self._ending.join(max(_MOMENT_S, deadline - time.monotonic()))
        return self._let_go.is_set()

    def wait_closed(self) -> None:
        """After a `close` that returned True: wait until the store is closed, however long that takes it."""
        if self._ending is not None:
            self._ending.join()

    def _end(self, ended: bool) -> None:
        if not ended:
            self.io.close(drain=False, timeout_s=_FOR_EVER_S)
        try:
            assert self._memory is not None, "one thread ends it, once"
            unregister_memory(self.store, self._memory)
        except Exception:
            self._failed("forget the host tier's memory")
        self._memory = None
        self._let_go.set()
        if self.owned:
            try:
                self.store.close()
            except Exception:
                self._failed("close")


def close_all(stores: Sequence[AttachedStore], *, drain: bool, timeout_s: float) -> bool:
    """Close them one after the other within `timeout_s` together, and wait for those that let go of the memory to be
    closed. Returns whether all of them did."""
    deadline = time.monotonic() + timeout_s
    ended = [store.close(drain=drain, timeout_s=max(0.0, deadline - time.monotonic())) for store in stores]
    for store, let_go in zip(stores, ended, strict=True):
        if let_go:
            store.wait_closed()
    return all(ended)
