"""Which call of the storage I/O serves a job."""

from __future__ import annotations

from concurrent.futures import Future

from kvhoist.memory.arena import HostArena
from kvhoist.messages import Job, JobKind, Shard, StorageKey
from kvhoist.storage.io import StorageIO
from kvhoist.storage.outcomes import PageOutcomes


def start_storage_job(io: StorageIO, arena: HostArena, shard: Shard, job: Job) -> Future[PageOutcomes]:
    """Hand a PREFETCH, LOOKUP or DROP job of one rank to the I/O threads."""
    keys = [StorageKey(job.page_key(i), shard) for i in range(job.num_pages)]
    if job.kind is JobKind.PREFETCH:
        return io.prefetch(keys, [arena.page(page) for page in job.host_pages])
    return io.lookup(keys) if job.kind is JobKind.LOOKUP else io.drop(keys)
