"""The mapped copy engine: a kernel that reads or writes host memory over the link, in few blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvhoist.copy.device_kernels import DeviceKernels
from kvhoist.copy.engine import Between, Started, whole_or_nothing
from kvhoist.copy.nests import Nest
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.relayout import Relayout, word_bytes_of
from kvhoist.copy.rounds import MAX_BLOCK_THREADS
from kvhoist.platform.base import Event, IdArray, Stream


class MappedCopy:
    """One direction between a host arena and a device cache. For one thread at a time.

    `block_quota` is how many blocks the kernel may take from the model that computes beside it. Raises ConfigError for
    rows that the kernel cannot move.
    """

    def __init__(self, between: Between, kernels: DeviceKernels, *, block_quota: int, num_groups: int = 1) -> None:
        self.between = between
        self._platform = between.platform
        self._kernels = kernels
        self._quota = block_quota
        self._stream = self._platform.make_stream(between.priority)
        self.streams: tuple[Stream, ...] = (self._stream,)
        self._groups = [(len(part.layers), self._relayout(part)) for part in between.plan.layer_groups(num_groups)]

    def synchronize(self) -> None:
        """Block until all that was enqueued is done."""
        self._stream.synchronize()

    def start(self, pages: IdArray, blocks: IdArray, after: Event | None) -> Started:
        """Enqueue the copy of host `pages` and device `blocks` behind `after`. Where it raises nothing is under way."""
        marks: list[tuple[int, Event]] = []
        done = 0
        num_steps = len(pages) * self.between.plan.steps_per_page
        ids = np.concatenate([self.between.host.device_addresses(pages), blocks])
        with self._platform.current(), self._kernels.ids.lent(ids, marks) as buffer, whole_or_nothing(self):
            pointers = (buffer.mapped_address, buffer.mapped_address + pages.nbytes)
            if after is not None:
                self._stream.wait(after)
            for num_layers, relayout in self._groups:
                relayout.launch(0, *pointers, num_steps, self._stream)
                done += num_layers
                marks.append((done, self._platform.record(self._stream)))
        return Started(marks, marks[-1][1])

    def _relayout(self, plan: CopyPlan) -> Relayout:
        return Relayout(
            [self._placed(nest, unit_stride=1) for nest in plan.nests],
            self._kernels.module,
            self._platform,
            word_bytes=word_bytes_of([self._placed(nest, self.between.page_pitch_bytes) for nest in plan.nests]),
            scatters=self.between.loads,
            steps_per_page=plan.steps_per_page,
            steps_per_id=plan.steps_per_page // self.between.ids_per_page,
            block_threads=MAX_BLOCK_THREADS,
            max_blocks=self._quota,
        )

    def _placed(self, nest: Nest, unit_stride: int) -> Nest:
        """Return the nest with addresses on the cache's side, and on the host's with offsets into a page: the ids there
        are the pages' own addresses, which need not stand at one distance from the host's (design rule 7)."""
        return self.between.with_pages(nest, replace(self.between.host_end(nest), unit_stride_bytes=unit_stride))
