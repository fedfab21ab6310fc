"""Blocks that an offload still reads, and what must wait when the engine gives one of them away."""

from __future__ import annotations

from kvhoist.messages import Job


class Fences:
    """Remembers which open OFFLOAD job reads which device blocks. Not thread-safe.

    vLLM frees and reuses blocks without asking. Instead of holding them back, a step that writes a block again is told
    to wait for the offload that reads it: blocks are never kept, so that nothing in flight can exhaust the pool, keep
    an idle engine awake, or make `reset_prefix_cache` fail. Of several jobs that read a block the last one is named:
    a rank does its offloads in order. `given` takes the blocks that requests were given since the last step.
    """

    def __init__(self) -> None:
        self.given: list[int] = []
        self._reader: dict[int, int] = {}
        self._blocks: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def open(self, job: Job) -> None:
        self._blocks[job.id] = job.device_blocks
        self._reader.update(dict.fromkeys(job.device_blocks, job.id))

    def close(self, job_id: int) -> None:
        """Forget a job that has read all of its blocks."""
        reader = self._reader
        for block in self._blocks.pop(job_id, ()):
            if reader.get(block) == job_id:
                del reader[block]

    def take_readers(self) -> set[int]:
        """Return the ids of the jobs that read any block of `given`, which is empty then."""
        reader, given = self._reader, self.given
        self.given = []
        return {reader[block] for block in given if block in reader} if reader else set()
