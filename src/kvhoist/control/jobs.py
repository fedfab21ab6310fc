"""Jobs in flight: one order to all ranks, finished when each rank has answered or is lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvhoist.errors import ConfigError
from kvhoist.messages import Completion, Job, JobKind


@dataclass(frozen=True, slots=True)
class Finished:
    """What all ranks together say of a job: a page failed if it failed on any rank. `bytes` are summed over ranks,
    `seconds` is the slowest rank's. `cancelled`: that was asked for, and what failed counts as not tried."""

    job: Job
    failed_pages: frozenset[int]
    error: str | None
    bytes: int
    seconds: float
    cancelled: bool = False


@dataclass(slots=True)
class _Open:
    job: Job
    waiting_for: set[int]
    failed_pages: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0
    cancelled: bool = False


class JobTracker:
    """Numbers jobs, collects the completions of `num_ranks` ranks, and says when a job is finished.

    A lost rank counts as having failed every page, for open jobs and for those opened before it is restored; a job
    still waits for the living ranks, since they may be writing into its pages. Not thread-safe.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        if num_ranks < 1:
            raise ConfigError("a cache needs at least one rank", got=num_ranks)
        self.num_ranks = num_ranks
        self.num_duplicates = 0
        self._open: dict[int, _Open] = {}
        self._lost: set[int] = set()
        self._next_id = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def jobs(self) -> list[Job]:
        """Return the jobs in flight, oldest first."""
        return [entry.job for entry in self._open.values()]

    def open(
        self,
        kind: JobKind,
        namespace: bytes,
        group: int,
        keys: Iterable[bytes],
        host_pages: Iterable[int] = (),
        device_blocks: Iterable[int] = (),
    ) -> Job:
        """Number and remember a job. Raises ConfigError when its parts do not fit together or all ranks are lost."""
        if len(self._lost) == self.num_ranks:
            raise ConfigError("no rank is left to take a job", remedy="Restart the workers and call restore_rank.")
        job = Job(self._next_id, kind, namespace, group, tuple(keys), tuple(host_pages), tuple(device_blocks))
        self._next_id += 1
        entry = _Open(job, set(range(self.num_ranks)))
        self._open[job.id] = entry
        for rank in self._lost:
            _fail_all(entry, rank)
        return job

    def complete(self, completion: Completion) -> Finished | None:
        """Take one rank's answer. Return the finished job with the last answer, else None; a second answer of a
        rank, or one to a job already finished, is counted and ignored.

        Raises ConfigError for an answer that no job can have.
        """
        if not (0 <= completion.rank < self.num_ranks and 0 <= completion.id < self._next_id):
            raise ConfigError(
                "a completion of an unknown rank or job",
                got=f"rank {completion.rank}, job {completion.id}",
                expected=f"a rank below {self.num_ranks}, a job below {self._next_id}",
            )
        entry = self._open.get(completion.id)
        if entry is None or completion.rank not in entry.waiting_for:
            self.num_duplicates += 1
            return None
        if any(not 0 <= page < entry.job.num_pages for page in completion.failed_pages):
            raise ConfigError(
                f"job {completion.id} has no such page",
                got=completion.failed_pages,
                expected=f"indices below {entry.job.num_pages}",
            )
        entry.waiting_for.discard(completion.rank)
        entry.failed_pages.update(completion.failed_pages)
        entry.bytes += completion.bytes
        entry.seconds = max(entry.seconds, completion.seconds)
        if completion.error:
            entry.errors.append(completion.error)
        return self._finish_if_answered(entry)

    def cancel(self, job_id: int) -> bool:
        """Mark an open job as cancelled: the ranks, whom the caller tells, leave out what they have not begun, and
        answer as ever. False where it was marked before."""
        entry = self._open[job_id]
        was, entry.cancelled = entry.cancelled, True
        return not was

    def is_cancelled(self, job_id: int) -> bool:
        return self._open[job_id].cancelled

    def lose_rank(self, rank: int) -> list[Finished]:
        """Declare a rank dead and return the jobs that this finishes. Idempotent."""
        if not 0 <= rank < self.num_ranks:
            raise ConfigError("no such rank", got=rank, expected=f"0 to {self.num_ranks - 1}")
        self._lost.add(rank)
        finished = []
        for entry in list(self._open.values()):
            if rank in entry.waiting_for:
                _fail_all(entry, rank)
                done = self._finish_if_answered(entry)
                if done is not None:
                    finished.append(done)
        return finished

    def restore_rank(self, rank: int) -> None:
        """Count on a rank again. Its host memory is new: the caller drops what the directory says of the host tier."""
        self._lost.discard(rank)

    def _finish_if_answered(self, entry: _Open) -> Finished | None:
        if entry.waiting_for:
            return None
        del self._open[entry.job.id]
        error = "; ".join(dict.fromkeys(entry.errors)) or None
        return Finished(
            entry.job, frozenset(entry.failed_pages), error, entry.bytes, entry.seconds, cancelled=entry.cancelled
        )


def _fail_all(entry: _Open, rank: int) -> None:
    entry.waiting_for.discard(rank)
    entry.failed_pages.update(range(entry.job.num_pages))
    entry.errors.append(f"rank {rank} was lost")
