"""When pages are made to survive a power cut: never, in every batch, or within some seconds."""

from __future__ import annotations

import logging
import threading
from collections import Counter

from kvhoist.errors import ConfigError
from kvhoist.storage.file.shelf import Shelf

FSYNC_POLICIES = ("never", "batch", "interval:SECONDS")
_MAX_INTERVAL_S = 86400.0

_log = logging.getLogger(__name__)


def interval_of(fsync: str) -> float | None:
    """Return within how many seconds written pages are to be durable: None for `never`, 0.0 for `batch`.

    Raises ConfigError.
    """
    if fsync in ("never", "batch"):
        return None if fsync == "never" else 0.0
    name, _, text = fsync.partition(":")
    try:
        seconds = float(text) if name == "interval" else 0.0
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MAX_INTERVAL_S:
        raise ConfigError(
            "an unknown fsync policy",
            got=repr(fsync),
            choices=FSYNC_POLICIES,
            remedy=f"SECONDS is above 0, at most {_MAX_INTERVAL_S:g}: fsync=interval:5",
        )
    return seconds


class Syncer:
    """Calls fdatasync on the segments that were written to. `lock` guards the shelves and `counts`.

    With an interval, a timer runs only while there is something to sync, so an idle store has no thread.
    """

    def __init__(self, interval_s: float | None, lock: threading.Condition, counts: Counter[str]) -> None:
        self.interval_s = interval_s
        self._lock = lock
        self._counts = counts
        self._dirty: set[Shelf] = set()
        self._timer: threading.Timer | None = None
        self._flushing = threading.Lock()

    def wrote(self, shelf: Shelf) -> None:
        """Take note of blobs and headers that were just written, before their pages are confirmed. Raises OSError where
        they cannot be made durable now, if they are to be now."""
        if self.interval_s == 0.0:
            shelf.segment.sync()
        if not self.interval_s:
            return
        with self._lock:
            if shelf not in self._dirty:
                self._dirty.add(shelf)
                shelf.num_users += 1
            if self._timer is None:
                self._timer = threading.Timer(self.interval_s, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Make durable what was noted so far."""
        with self._flushing:
            with self._lock:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = None
                dirty, self._dirty = self._dirty, set()
            for shelf in dirty:
                self._sync(shelf)

    def _sync(self, shelf: Shelf) -> None:
        try:
            if not shelf.gone:
                shelf.segment.sync()
        except OSError as error:
            with self._lock:
                self._counts["error"] += 1
            _log.warning("the last pages in %s may not survive a power cut: %s", shelf.segment.path, error)
        finally:
            with self._lock:
                shelf.num_users -= 1
            shelf.close_if_unused(self._lock)
