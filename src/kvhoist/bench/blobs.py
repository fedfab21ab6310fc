"""Host pages to and from one piece of device memory, without any relayout: the part of `staged` that is the link's."""

from __future__ import annotations

import numpy as np

from kvhoist.copy.engine import Between, Started
from kvhoist.platform.base import Event, IdArray, Stream

NAME = "blobs alone"


class Blobs:
    """A copy engine that leaves the cache as it is: all pages in one batch."""

    def __init__(self, between: Between, num_pages: int) -> None:
        self.between = between
        self._platform = between.platform
        self._stream = self._platform.make_stream(between.priority)
        self.streams: tuple[Stream, ...] = (self._stream,)
        pitch = between.page_pitch_bytes
        self._flat = self._platform.allocate(num_pages * pitch)
        self._staged = np.arange(num_pages, dtype=np.int64) * pitch + self._flat.address
        self._lengths = np.full(num_pages, pitch, dtype=np.int64)

    def start(self, pages: IdArray, blocks: IdArray, after: Event | None) -> Started:
        """Enqueue the copy of at most `num_pages` host `pages` behind `after`."""
        host = pages * self.between.page_pitch_bytes + self.between.host.region.address
        staged = self._staged[: len(pages)]
        ends = (host, staged) if self.between.loads else (staged, host)
        with self._platform.current():
            if after is not None:
                self._stream.wait(after)
            self._platform.copy_batch(*ends, self._lengths[: len(pages)], self._stream)
            end = self._platform.record(self._stream)
        return Started([(len(self.between.plan.layers), end)], end)

    def synchronize(self) -> None:
        self._stream.synchronize()
