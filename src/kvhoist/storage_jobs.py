"""Which call of the storage I/O serves a job, and how its outcome answers it."""

from __future__ import annotations

from concurrent.futures import Future

from kvhoist.memory.arena import HostArena
from kvhoist.messages import Completion, Job, JobKind, Shard, StorageKey
from kvhoist.storage.io import StorageIO
from kvhoist.storage.outcomes import PENDING, PageOutcomes
from kvhoist.storage.queue import OnPart


def start_storage_job(io: StorageIO, arena: HostArena, shard: Shard, job: Job, on_part: OnPart) -> Future[PageOutcomes]:
    """Hand a PERSIST, PREFETCH, LOOKUP or DROP job of one rank to the I/O threads; `on_part` as there."""
    keys = [StorageKey(job.page_key(i), shard) for i in range(job.num_pages)]
    blobs = [arena.page(page) for page in job.host_pages]
    if job.kind is JobKind.PERSIST:
        return io.persist(keys, blobs, on_part=on_part)
    if job.kind is JobKind.PREFETCH:
        return io.prefetch(keys, blobs, on_part=on_part)
    return io.lookup(keys) if job.kind is JobKind.LOOKUP else io.drop(keys)


def answer_of(job: Job, rank: int, outcomes: PageOutcomes) -> Completion:
    """Return a rank's answer to its job, or to those of its pages that are not pending."""
    pending = outcomes.pending_pages
    failed = tuple(page for page in outcomes.failed_pages if outcomes.reasons[page] != PENDING)
    return Completion(job.id, rank, failed, outcomes.error, outcomes.bytes, outcomes.seconds, pending)


def newly_arrived(job: Job, told: set[int], outcomes: PageOutcomes) -> list[int]:
    """Return the host pages that a prefetch has filled, each once: `told` are the indices of those returned before."""
    good = {i for i, reason in enumerate(outcomes.reasons) if reason is None} if job.kind is JobKind.PREFETCH else set()
    new = good - told
    told |= new
    return [job.host_pages[i] for i in sorted(new)]
