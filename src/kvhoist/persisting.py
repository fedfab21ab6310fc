"""Pages on their way to storage: an early write, and a job that several of them answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from kvhoist.messages import Job
from kvhoist.storage.outcomes import CANCELLED, PENDING, PageOutcomes
from kvhoist.storage.queue import OnPart


class Persisting(NamedTuple):
    """Pages on their way to storage: their outcomes, and the call that cancels what of them has not begun."""

    future: Future[PageOutcomes]
    cancel: Callable[[], bool]


class EarlyWrite:
    """The early write of the pages of one OFFLOAD job, announced first and started a little later."""

    def __init__(self, job: Job, store: object) -> None:
        """`store`: what it is written to."""
        self.job = job
        self.store = store
        self.future: Future[PageOutcomes] = Future()
        self.awaited_until: float | None = None
        self._cancel_write: Callable[[], bool] | None = None
        self._part: PageOutcomes | None = None
        self._listeners: list[OnPart] = []
        self._lock = threading.Lock()

    def start(self, write: Callable[[Job], Persisting]) -> None:
        """Hand the pages to storage, unless they were cancelled first."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            written, self._cancel_write = write(self.job)
        except Exception as error:  # whatever it is: who waits to fill these pages must not wait for ever
            self.future.set_result(PageOutcomes((_reason(error),) * self.job.num_pages))
            return
        written.add_done_callback(self._end)

    def tell_part(self, part: PageOutcomes) -> None:
        """Tell those who listen what is known of the pages while storage hangs in some of them."""
        with self._lock:
            self._part, listeners = part, [*self._listeners]
        for listener in listeners:
            listener(part)

    def listen(self, listener: OnPart) -> None:
        """Let `listener` be told of parts, of one that is known already at once."""
        with self._lock:
            self._listeners.append(listener)
            part = self._part
        if part is not None:
            listener(part)

    def cancel(self) -> bool:
        """As StorageIO.cancel; False also in the instant in which storage takes the pages."""
        if self.future.cancel():
            return True
        return self._cancel_write is not None and self._cancel_write()

    def _end(self, written: Future[PageOutcomes]) -> None:
        cancelled = PageOutcomes((CANCELLED,) * self.job.num_pages)
        self.future.set_result(cancelled if written.cancelled() else written.result())


class GatheredPersist:
    """A PERSIST job whose outcomes come from several batches; `places` says which page of a batch is page `i` of it."""

    def __init__(
        self, job: Job, write: Callable[[Sequence[int], OnPart], Persisting], on_part: OnPart, page_bytes: int
    ) -> None:
        self.future: Future[PageOutcomes] = Future()
        self.future.set_running_or_notify_cancel()  # it ends by `cancel` below, never by a cancel of its own
        self._write = write
        self._on_part = on_part
        self._page_bytes = page_bytes
        self._reasons: list[str | None] = [PENDING] * job.num_pages
        self._left_pages = job.num_pages
        self._seconds = 0.0
        self._cancelled = False
        self._batches: list[Persisting] = []
        self._lock = threading.Lock()

    def write(self, indices: Sequence[int]) -> None:
        """Write these pages of the job for the job itself."""
        if not indices:
            return
        places = {i: place for place, i in enumerate(indices)}
        try:
            batch = self._write(indices, partial(self._part_done, places, False))
        except Exception as error:  # in a callback nobody else would answer for these pages
            self._book(dict.fromkeys(indices, _reason(error)), 0.0)
            return
        self._follow(batch, places, again=False)

    def take(self, early: EarlyWrite, places: dict[int, int]) -> None:
        """Let pages of the job come to what an early write of them comes to. One that is given up for another's sake is
        written for the job itself."""
        early.listen(partial(self._part_done, places, True))
        self._follow(Persisting(early.future, early.cancel), places, again=True)

    def cancel(self) -> bool:
        """As StorageIO.cancel."""
        with self._lock:
            self._cancelled = True
            batches = [batch for batch in self._batches if not batch.future.done()]
        return sum(batch.cancel() for batch in batches) > 0

    def _follow(self, batch: Persisting, places: dict[int, int], *, again: bool) -> None:
        with self._lock:
            self._batches.append(batch)
        batch.future.add_done_callback(partial(self._done, places, again))

    def _done(self, places: dict[int, int], again: bool, batch: Future[PageOutcomes]) -> None:
        self._take_in(places, again, None if batch.cancelled() else batch.result())

    def _part_done(self, places: dict[int, int], again: bool, part: PageOutcomes) -> None:
        self._take_in(places, again, part)
        with self._lock:
            told = self._outcomes() if self._left_pages else None
        if told is not None:
            self._on_part(told)

    def _take_in(self, places: dict[int, int], again: bool, outcomes: PageOutcomes | None) -> None:
        """Book what is known of a batch's pages (None: it was cancelled), each once: they are taken out of `places`."""
        with self._lock:
            again = again and not self._cancelled
            reasons = {i: CANCELLED if outcomes is None else outcomes.reasons[place] for i, place in places.items()}
            known = {i: reason for i, reason in reasons.items() if reason != PENDING}
            for i in known:
                del places[i]
        given_up = [i for i, reason in known.items() if again and reason == CANCELLED]
        seconds = 0.0 if outcomes is None else outcomes.seconds
        self._book({i: reason for i, reason in known.items() if i not in given_up}, seconds)
        self.write(given_up)

    def _book(self, reasons: Mapping[int, str | None], seconds: float) -> None:
        if not reasons:
            return
        with self._lock:
            for i, reason in reasons.items():
                self._reasons[i] = reason
            self._seconds = max(self._seconds, seconds)
            self._left_pages -= len(reasons)
            if self._left_pages:
                return
            outcomes = self._outcomes()
        self.future.set_result(outcomes)

    def _outcomes(self) -> PageOutcomes:
        return PageOutcomes(tuple(self._reasons), self._reasons.count(None) * self._page_bytes, self._seconds)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
