"""Jobs in flight: one order to all ranks, finished when each rank has answered or is lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvhoist.errors import ConfigError
from kvhoist.messages import Completion, Job, JobKind


@dataclass(frozen=True, slots=True)
class Finished:
    """What all ranks together say of a job: a page failed if it failed on any rank. `bytes` are summed over ranks,
    `seconds` is the slowest rank's. `cancelled`: that was asked for, and what failed counts as not tried.

    `pages`: those that all ranks have answered now, where another part was answered before or is to come (None: all of
    the job's); `is_last`: none is to come. Bytes and seconds are told with the last part.
    """

    job: Job
    failed_pages: frozenset[int]
    error: str | None
    bytes: int
    seconds: float
    cancelled: bool = False
    pages: frozenset[int] | None = None
    is_last: bool = True


@dataclass(slots=True)
class _Open:
    """`waiting_for` has the pages that each rank still has to answer, None for all of them."""

    job: Job
    waiting_for: dict[int, frozenset[int] | None]
    settled: frozenset[int] = frozenset()
    failed_pages: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0
    cancelled: bool = False


class JobTracker:
    """Numbers jobs, collects the completions of `num_ranks` ranks, and says when a job is finished.

    A rank may answer a job in parts; what all ranks have answered is finished then.
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
        entry = _Open(job, dict.fromkeys(range(self.num_ranks)))
        self._open[job.id] = entry
        for rank in self._lost:
            _fail_all(entry, rank)
        return job

    def complete(self, completion: Completion) -> Finished | None:
        """Take one rank's answer. Return the finished job with the last answer (or what part of it is finished), else
        None; a second answer of a rank, or one to a job already finished, is counted and ignored.

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
        named = completion.failed_pages + completion.pending_pages
        if any(not 0 <= page < entry.job.num_pages for page in named):
            raise ConfigError(
                f"job {completion.id} has no such page", got=named, expected=f"indices below {entry.job.num_pages}"
            )
        left = entry.waiting_for.pop(completion.rank)
        pending = frozenset(completion.pending_pages)
        entry.failed_pages.update(page for page in completion.failed_pages if left is None or page in left)
        if pending:
            entry.waiting_for[completion.rank] = pending if left is None else pending & left
        else:
            entry.bytes += completion.bytes
            entry.seconds = max(entry.seconds, completion.seconds)
        if completion.error:
            entry.errors.append(completion.error)
        return self._finish_answered(entry)

    def cancel(self, job_id: int) -> bool:
        """Mark an open job as cancelled: the ranks, whom the caller tells, leave out what they have not begun, and
        answer as ever. False where it was marked before."""
        entry = self._open[job_id]
        was, entry.cancelled = entry.cancelled, True
        return not was

    def is_cancelled(self, job_id: int) -> bool:
        return self._open[job_id].cancelled

    def hangs(self, job_id: int) -> bool:
        """Tell whether a part of an open job is finished: the ranks say so only where the rest hangs."""
        return bool(self._open[job_id].settled)

    def num_left(self, job_id: int) -> int:
        """Count the pages of an open job that are not finished."""
        entry = self._open[job_id]
        return entry.job.num_pages - len(entry.settled)

    def lose_rank(self, rank: int) -> list[Finished]:
        """Declare a rank dead and return the jobs that this finishes. Idempotent."""
        if not 0 <= rank < self.num_ranks:
            raise ConfigError("no such rank", got=rank, expected=f"0 to {self.num_ranks - 1}")
        self._lost.add(rank)
        finished = []
        for entry in list(self._open.values()):
            if rank in entry.waiting_for:
                _fail_all(entry, rank)
                done = self._finish_answered(entry)
                if done is not None:
                    finished.append(done)
        return finished

    def restore_rank(self, rank: int) -> None:
        """Count on a rank again. Its host memory is new: the caller drops what the directory says of the host tier."""
        self._lost.discard(rank)

    def _finish_answered(self, entry: _Open) -> Finished | None:
        """Return what all ranks have answered and was not returned before; None for nothing."""
        pending: set[int] = set()
        for pages in entry.waiting_for.values():
            if pages is None:
                return None
            pending |= pages
        now = None
        if pending or entry.settled:
            now = frozenset(range(entry.job.num_pages)) - pending - entry.settled
            entry.settled |= now
            if pending and not now:
                return None
        if not pending:
            del self._open[entry.job.id]
        failed = frozenset(entry.failed_pages) if now is None else now & entry.failed_pages
        error = "; ".join(dict.fromkeys(entry.errors)) or None
        num_bytes, seconds = (0, 0.0) if pending else (entry.bytes, entry.seconds)
        return Finished(entry.job, failed, error, num_bytes, seconds, entry.cancelled, now, is_last=not pending)


def _fail_all(entry: _Open, rank: int) -> None:
    left = entry.waiting_for.pop(rank)
    entry.failed_pages.update(range(entry.job.num_pages) if left is None else left)
    entry.errors.append(f"rank {rank} was lost")
