"""A worker's side of attaching and detaching stores: it opens and closes them in threads of their own."""

from __future__ import annotations

import logging
import threading
from collections import deque

from kvhoist.adapters.vllm.metadata import StoreAct, StoreAnswer, StoreOrder
from kvhoist.adapters.vllm.options import ConnectorOptions
from kvhoist.affinity import start
from kvhoist.attached_store import AttachedStore, close_all
from kvhoist.memory.arena import HostArena
from kvhoist.mover import Mover

_log = logging.getLogger("vllm.kvhoist")


class WorkerStores:
    """The store that one rank has, one that it has opened and does not use yet, and those whose last calls it awaits.

    `obey` is called from the thread that runs the model, and never blocks.
    """

    def __init__(self, options: ConnectorOptions, arena: HostArena, rank: int) -> None:
        """Open the store of the settings. Raises what opening it raises."""
        self._options = options
        self._arena = arena
        self._rank = rank
        self._answers: deque[StoreAnswer] = deque()
        self._opened: AttachedStore | None = None
        self._given_up: list[AttachedStore] = []
        self._closed = False
        self._lock = threading.Lock()
        self.current = None if options.storage is None else self._open(options.storage)

    def obey(self, order: StoreOrder, mover: Mover) -> None:
        """Begin what the scheduler's side orders."""
        if order.act is StoreAct.OPEN:
            start(threading.Thread(target=self._try_open, args=(order,), name="kvhoist-store-open", daemon=True))
            return
        with self._lock:
            opened, self._opened = self._opened, None
            if order.act is StoreAct.GIVE_UP:
                mover.detach(drain=order.drain)
                given_up, self.current = self.current or opened, None
                self._given_up += [given_up] if given_up is not None else []
            else:
                assert opened is not None, "every rank has opened it"
                mover.attach(opened.io, early=opened.persists)
                self.current = opened
                return
        start(threading.Thread(target=self._give_up, args=(order, given_up), name="kvhoist-store-end", daemon=True))

    def take_answers(self) -> tuple[StoreAnswer, ...]:
        """Return what became of orders since the last call."""
        if not self._answers:
            return ()
        return tuple(self._answers.popleft() for _ in range(len(self._answers)))

    def close(self, *, drain: bool, timeout_s: float) -> bool:
        """Give all stores back. Returns whether none of them holds the arena any more."""
        with self._lock:
            self._closed = True
            held = [*self._given_up, *(store for store in (self.current, self._opened) if store is not None)]
        return close_all(held, drain=drain, timeout_s=timeout_s)

    def _try_open(self, order: StoreOrder) -> None:
        try:
            opened = self._open(order.address)
        except BaseException as error:  # of a stranger's store, say: the scheduler's side waits for an answer
            self._answers.append(StoreAnswer(self._rank, order.id, error=f"{type(error).__name__}: {error}"))
            return
        with self._lock:
            closed = self._closed
            if not closed:
                self._opened = opened
        if closed:
            opened.close(drain=False, timeout_s=0.0)
        self._answers.append(StoreAnswer(self._rank, order.id, persists=opened.persists))

    def _give_up(self, order: StoreOrder, store: AttachedStore | None) -> None:
        ended = store is None or store.close(drain=order.drain, timeout_s=order.timeout_s)
        if ended:
            with self._lock:
                self._given_up = [one for one in self._given_up if one is not store]
        self._answers.append(StoreAnswer(self._rank, order.id, memory_kept=not ended))

    def _open(self, address: str) -> AttachedStore:
        return AttachedStore(
            address,
            self._arena,
            num_threads=self._options.io_threads,
            max_queued_pages=self._options.max_queued_pages,
            failed=lambda what: _log.warning("kvhoist: the store could not %s", what, exc_info=True),
        )
