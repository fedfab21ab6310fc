"""The place of one cache's store: filled when the cache is built or later, emptied while the engine runs."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from datetime import datetime

from kvhoist.attached_store import AttachedStore, close_all
from kvhoist.config import CacheConfig
from kvhoist.control.namespace import Namespace
from kvhoist.control.plane import ControlPlane
from kvhoist.errors import ClosedError, ConfigError, StorageError
from kvhoist.memory.arena import HostArena
from kvhoist.mover import Mover
from kvhoist.stats import DetachReport, DetachTally
from kvhoist.storage.base import Store, StoreStats
from kvhoist.storage.outcomes import PageOutcomes

_log = logging.getLogger(__name__)

_HINTS_AT_ONCE = 4096
"""Forgotten with the cache's lock held, in a few ms."""


class StoreSlot:
    """The store that a cache has, if it has one, and those it had of which a call has not returned yet.

    `lock` is the cache's, which guards `current`; it is never held while a store is called. One attach or detach at a
    time. Raises as AttachedStore does.
    """

    def __init__(self, lock: threading.RLock, arena: HostArena, config: CacheConfig, store: Store | str | None) -> None:
        self.num_errors = 0
        self._lock = lock
        self._arena = arena
        self._config = config
        self._changing = threading.Lock()
        self._namespaces: dict[bytes, Namespace] = {}
        self._noting: list[Future[PageOutcomes]] = []
        self._detached = ""
        self._let_go: list[AttachedStore] = []
        self.current = None if store is None else self._open(store)

    @property
    def state(self) -> str:
        """Say which store is attached, for people."""
        current = self.current
        if current is not None:
            return f"attached: {current.name}"
        return f"no store attached{self._detached}"

    def attach(self, target: Store | str, plane: ControlPlane, mover: Mover, check_open: Callable[[], None]) -> None:
        """Open a store and let both planes use it. Raises StorageError where one is attached or another call is at it,
        what `check_open` raises, and what opening the store raises; nothing has changed then."""
        with self._change():
            with self._lock:
                check_open()
                if self.current is not None:
                    raise StorageError(
                        "this cache has a store already",
                        got=self.state,
                        remedy="Detach it first: detach_store(), or kvhoist detach.",
                    )
            attached = self._open(target)
            try:
                with self._lock:
                    check_open()
                    plane.attach_storage(persists=attached.persists)
                    mover.attach(attached.io)
                    self.current = attached
                    for namespace in self._namespaces.values():
                        self._note(namespace, attached)
            except BaseException:
                with self._lock:  # as it was: there was none
                    self.current = None
                    mover.detach(drain=False)
                    plane.detach_storage()
                attached.close(drain=False, timeout_s=1.0)
                raise
        _log.info("store %s is attached", attached.name)

    def detach(
        self, plane: ControlPlane, mover: Mover, check_open: Callable[[], None], *, drain: bool, timeout_s: float
    ) -> DetachReport:
        """Let neither plane use the store, then finish (or cancel) what is under way there. Raises StorageError where
        none is attached or another call is at it, and what `check_open` raises."""
        with self._change():
            with self._lock:
                check_open()
                attached = self.current
                if attached is None:
                    raise StorageError("there is no store to detach", got=self.state)
                tally = DetachTally(attached.name, plane)
                plane.detach_storage()
                mover.detach(drain=drain)
                self.current = None
                self._detached = f"; {attached.name} was detached at {datetime.now().astimezone():%Y-%m-%d %H:%M:%S}"
                self._let_go.append(attached)
            while self._drop_hints(plane):
                pass
            ended = attached.close(drain=drain, timeout_s=timeout_s)
            with self._lock:
                self._let_go = [one for one in self._let_go if not (ended and one is attached)]
                report = tally.report(memory_kept=not ended)
        _log.log(
            logging.INFO if ended else logging.WARNING,
            "store %s is detached%s",
            attached.name,
            "" if ended else ", but one of its calls has not returned and keeps its pages",
        )
        return report

    def note(self, namespace: Namespace) -> None:
        """Let this store and each later one keep what the namespace stands for, without waiting; a failure costs an
        explanation only. With the lock held."""
        if namespace.digest not in self._namespaces:
            self._namespaces[namespace.digest] = namespace
            if self.current is not None:
                self._note(namespace, self.current)

    def noted(self) -> list[Namespace]:
        """Return the namespaces that the store knows, none where it cannot say."""
        current, found = self.current, []
        try:
            for fields in (current.store.namespaces() if current is not None else {}).values():
                with contextlib.suppress(ConfigError):  # what another version or a stranger wrote
                    found.append(Namespace.from_fields(fields))
        except Exception:
            self._failed("say which namespaces it holds")
        return found

    def stats(self) -> StoreStats | None:
        """Return what the store counts; None where it cannot say or there is none. Never with the lock held: a store
        that hangs must not take the cache with it."""
        current = self.current
        try:
            return None if current is None else current.store.stats()
        except Exception:
            self._failed("count its pages")
            return None

    def wait_noted(self, timeout_s: float) -> bool:
        """Wait until the namespaces are noted; False after `timeout_s`."""
        return not futures.wait(self._noting, timeout_s).not_done

    def close(self, *, timeout_s: float) -> bool:
        """Cancel what is under way and give all stores back. Returns whether none of them holds the arena any more. A
        store that is being attached is closed by that call."""
        with self._lock:
            held = [*self._let_go, *([self.current] if self.current is not None else [])]
        return close_all(held, drain=False, timeout_s=timeout_s)

    def _drop_hints(self, plane: ControlPlane) -> bool:
        with self._lock:
            return plane.directory.drop_hints(_HINTS_AT_ONCE, "storage was detached") > 0

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        if not self._changing.acquire(blocking=False):
            raise StorageError(
                "another attach or detach of this cache's store is under way", remedy="Call again when it has ended."
            )
        try:
            yield
        finally:
            self._changing.release()

    def _open(self, target: Store | str) -> AttachedStore:
        return AttachedStore(
            target,
            self._arena,
            num_threads=self._config.io_threads,
            max_queued_pages=self._config.max_queued_pages,
            secret=self._config.store_secret,
            failed=self._failed,
        )

    def _note(self, namespace: Namespace, attached: AttachedStore) -> None:
        with contextlib.suppress(ClosedError):
            noting = attached.io.note_namespace(namespace.digest, namespace.field_dict())
            self._noting = [future for future in self._noting if not future.done()] + [noting]
            noting.add_done_callback(self._noted_or_failed)

    def _noted_or_failed(self, noting: Future[PageOutcomes]) -> None:
        if noting.cancelled() or noting.result().error:
            self._failed("keep the fields of a namespace")

    def _failed(self, what: str) -> None:
        """Count and log what a store could not do, from within the handler of its exception."""
        with self._lock:
            self.num_errors += 1
        _log.warning("the store could not %s", what, exc_info=True)
