"""The threads of one direction's copies: they begin in the order in which they came, and end in it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from kvhoist.affinity import start
from kvhoist.copies import Finish
from kvhoist.errors import DeviceError
from kvhoist.messages import JobKind
from kvhoist.platform.base import Event, Platform
from kvhoist.transfer import Transfer

_log = logging.getLogger(__name__)

Work = tuple[Transfer, Event | None]


class CopyLane:
    """Begins copies in one thread. Where the platform is asynchronous another one waits for their ends, so that a copy
    is enqueued while the one before is on the link; both sleep while there is nothing to do.

    `begin(transfer, after)` returns what waits for the copy's end, None where it answered or handed over the job;
    `end(transfer, finish)` calls that and answers. Neither may raise.
    """

    def __init__(
        self,
        name: str,
        platform: Platform,
        begin: Callable[[Transfer, Event | None], Finish | None],
        end: Callable[[Transfer, Finish], None],
    ) -> None:
        self._platform = platform
        self._begin = begin
        self._end = end
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._begun: SimpleQueue[tuple[Transfer, Finish] | None] = SimpleQueue()
        targets = {name: self._run}
        if platform.capabilities.asynchronous:
            targets[f"{name}-end"] = self._finish
        self._threads = [threading.Thread(target=run, name=who, daemon=True) for who, run in targets.items()]
        try:
            start(*self._threads)
        except BaseException:
            self.close()
            self._begun.put(None)
            raise

    @classmethod
    def open_both(
        cls,
        rank: int,
        platform: Platform,
        begin: Callable[[Transfer, Event | None], Finish | None],
        end: Callable[[Transfer, Finish], None],
    ) -> dict[JobKind, CopyLane]:
        """Return a lane for loads and one for offloads; none lives on where one cannot start."""
        lanes: dict[JobKind, CopyLane] = {}
        try:
            for kind in (JobKind.LOAD, JobKind.OFFLOAD):
                lanes[kind] = cls(f"kvhoist-{kind}-{rank}", platform, begin, end)
        except BaseException:
            for lane in lanes.values():
                lane.close()
            raise
        return lanes

    def put(self, transfer: Transfer, after: Event | None) -> None:
        self._queue.put((transfer, after))

    def close(self) -> None:
        """End the threads once what was put is done."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads' ends, all but the calling one's; False where `timeout_s` passed first."""
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in others)

    def _enter(self) -> None:
        """Prepare the calling thread. On a device that is gone that fails, and so will each job, which is answered."""
        try:
            self._platform.enter_thread()
        except DeviceError:
            _log.exception("a thread of kvhoist cannot use %s", self._platform.device)

    def _run(self) -> None:
        self._enter()
        while (work := self._queue.get()) is not None:
            transfer, after = work
            finish = self._begin(transfer, after)
            if finish is None:
                continue
            if self._platform.capabilities.asynchronous:
                self._begun.put((transfer, finish))
            else:
                self._end(transfer, finish)
        self._begun.put(None)

    def _finish(self) -> None:
        self._enter()
        while (begun := self._begun.get()) is not None:
            self._end(*begun)
