"""A job under way on one rank, as its caller sees it: a future that can be awaited whole or layer by layer."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvhoist.checks import seconds
from kvhoist.errors import TransferError
from kvhoist.messages import Completion, Job
from kvhoist.platform.base import Event, Stream

_log = logging.getLogger(__name__)


class Transfer:
    """The future of one job on one rank. Thread-safe.

    `layers` are the layers a load brings, in the order in which they arrive; other kinds arrive as a whole.
    """

    def __init__(self, job: Job, layers: tuple[int, ...] = ()) -> None:
        self.job = job
        self.started = 0.0
        self.told_pages: set[int] = set()
        self.telling = threading.Lock()
        self._index = {layer: i for i, layer in enumerate(layers)}
        self._arrived = 0
        self._marks: Sequence[tuple[int, Event]] = ()
        self._read: Event | None = None
        self._completion: Completion | None = None
        self._callbacks: list[Callable[[Transfer], None]] = []
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        state = "done" if self.done else "under way"
        return f"<Transfer {self.job.kind} #{self.job.id}, {self.job.num_pages} pages, {state}>"

    @property
    def done(self) -> bool:
        return self._completion is not None

    @property
    def completion(self) -> Completion | None:
        """This rank's answer, once it is given."""
        return self._completion

    def lost_keys(self) -> tuple[bytes, ...]:
        """Return the keys of the pages that are not in place: those that failed, or all while the job is under way."""
        completion = self._completion
        if completion is None:
            return self.job.keys
        return tuple(self.job.keys[page] for page in completion.failed_pages)

    def wait(self, layer: int | None = None, *, timeout_s: float | None = None, stream: Stream | None = None) -> None:
        """Block until `layer` (or all, with None) of every page is in place. With `stream` let later work of that
        stream wait instead: then this blocks only until the copy is enqueued, and a page may still fail.

        Raises TransferError when a page failed (`completion.failed_pages` says which), TimeoutError when `timeout_s`
        passed first, in which case the transfer goes on, ConfigError for a `timeout_s` that is no time.
        """
        deadline = None if timeout_s is None else time.monotonic() + seconds("timeout_s", timeout_s)
        by_event = stream is not None or layer is not None
        with self._changed:
            while not self._in_place(layer) and not (by_event and self._marks):
                self._wait_until(deadline, timeout_s)
            event = None if self._in_place(layer) else self._event_of(layer)
        if event is not None and stream is not None:
            stream.wait(event)
            return
        if event is not None and not event.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"{self!r} was not in place after {timeout_s} s")
        completion = self._completion
        if completion is not None and completion.failed_pages:
            raise TransferError(
                f"{self.job.kind} job {self.job.id} failed",
                got=f"{len(completion.failed_pages)} of {self.job.num_pages} pages failed: {completion.error}",
                remedy="Recompute the tokens of those pages.",
            )

    def wait_read(self, stream: Stream) -> None:
        """Let later work of `stream` wait until this copy has read its source: an offload's device blocks may be
        written again then. Blocks until the copy is enqueued."""
        with self._changed:
            while self._completion is None and self._read is None:
                self._changed.wait()
            event = self._read if self._completion is None else None
        if event is not None:
            stream.wait(event)

    def result(self, timeout_s: float | None = None) -> Completion:
        """Block until the job is answered and return the answer, failed pages or not. Raises TimeoutError."""
        with contextlib.suppress(TransferError):
            self.wait(timeout_s=timeout_s)
        assert self._completion is not None
        return self._completion

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call `callback(self)` when the job is answered: in the thread that answers, or now if it is answered. One
        that raises is logged, and does no other harm."""
        with self._changed:
            if self._completion is None:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def arrive(self, num_layers: int) -> None:
        """For the mover: the first `num_layers` layers are in place."""
        with self._changed:
            self._arrived = num_layers
            self._changed.notify_all()

    def enqueued(self, marks: Sequence[tuple[int, Event]], read: Event) -> None:
        """For the mover: the copy is in the device's queues. After `marks[i][1]` the first `marks[i][0]` layers are in
        place (the last mark is the whole copy's end), after `read` nothing is read from the source any more."""
        with self._changed:
            self._marks, self._read = marks, read
            self._changed.notify_all()

    def finish(self, completion: Completion) -> None:
        """For the mover: the job is answered. `call_back` follows, once nothing waits for this thread any more."""
        with self._changed:
            self._completion = completion
            self._changed.notify_all()

    def call_back(self) -> None:
        """For the mover: call those who asked for it."""
        with self._changed:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Transfer], None]) -> None:
        try:
            callback(self)
        except (Exception, SystemExit):  # a stranger's code: the thread that answers must live on
            _log.exception("a callback of %r raised", self)

    def _wait_until(self, deadline: float | None, timeout_s: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError(f"{self!r} was not in place after {timeout_s} s")
        self._changed.wait(left)

    def _event_of(self, layer: int | None) -> Event:
        index = self._index.get(layer) if layer is not None else None
        arriving = (event for num_layers, event in self._marks if index is not None and index < num_layers)
        return next(arriving, self._marks[-1][1])

    def _in_place(self, layer: int | None) -> bool:
        if self._completion is not None:
            return True
        return layer is not None and layer in self._index and self._index[layer] < self._arrived
