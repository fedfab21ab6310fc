"""Blocks that an offload still reads, and what must wait when the engine gives one of them away."""

from __future__ import annotations

from collections.abc import Iterable

from kvhoist.messages import Job


class Fences:
    """Remembers which open OFFLOAD job reads which device blocks. Not thread-safe.

    vLLM frees and reuses blocks without asking. Instead of holding them back, a step that writes a block again is told
    to wait for the offload that reads it: blocks are never kept, so that nothing in flight can exhaust the pool, keep
    an idle engine awake, or make `reset_prefix_cache` fail. Of several jobs that read a block the last one is named:
    a rank does its offloads in order.
    """

    def __init__(self) -> None:
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

    def readers(self, blocks: Iterable[int]) -> set[int]:
        """Return the ids of the jobs that read any of `blocks`."""
        if not self._reader:
            return set()
        reader = self._reader
        return {reader[block] for block in blocks if block in reader}
