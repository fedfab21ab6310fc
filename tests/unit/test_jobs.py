"""Jobs of N ranks: finished when all have answered; duplicates and lost ranks included."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhoist.control.jobs import Finished, JobTracker
from kvhoist.errors import ConfigError
from kvhoist.messages import Completion, Job, JobKind

KEYS = (b"a" * 32, b"b" * 32, b"c" * 32)


def open_job(tracker: JobTracker) -> Job:
    return tracker.open(JobKind.PERSIST, b"n" * 32, 0, KEYS, (4, 5, 6))


def test_a_job_is_finished_by_the_last_rank_and_a_page_fails_if_it_failed_on_any():
    tracker = JobTracker(num_ranks=3)
    job = open_job(tracker)
    assert tracker.complete(Completion(job.id, 0, bytes=10, seconds=1.0)) is None
    assert tracker.complete(Completion(job.id, 2, (1,), "disk", bytes=5, seconds=3.0)) is None
    finished = tracker.complete(Completion(job.id, 1, (2,), "link", bytes=7))
    assert finished == Finished(job, frozenset({1, 2}), "disk; link", 22, 3.0)
    assert tracker.num_open == 0


def test_a_second_answer_of_a_rank_does_no_harm():
    tracker = JobTracker(num_ranks=2)
    job = open_job(tracker)
    tracker.complete(Completion(job.id, 0))
    assert tracker.complete(Completion(job.id, 0, (0, 1, 2), "late lie")) is None
    finished = tracker.complete(Completion(job.id, 1))
    assert finished is not None
    assert not finished.failed_pages
    assert tracker.complete(Completion(job.id, 1)) is None
    assert tracker.num_duplicates == 2


def test_a_lost_rank_fails_its_pages_but_the_living_ranks_are_waited_for():
    tracker = JobTracker(num_ranks=2)
    job = open_job(tracker)
    assert tracker.lose_rank(1) == []
    assert tracker.num_open == 1, "rank 0 may still be writing into these pages"
    finished = tracker.complete(Completion(job.id, 0))
    assert finished is not None
    assert finished.failed_pages == {0, 1, 2}
    assert "rank 1 was lost" in (finished.error or "")


def test_losing_the_last_rank_that_owed_an_answer_finishes_the_job():
    tracker = JobTracker(num_ranks=2)
    job = open_job(tracker)
    tracker.complete(Completion(job.id, 0))
    assert [finished.job for finished in tracker.lose_rank(1)] == [job]
    assert tracker.lose_rank(1) == []


def test_jobs_opened_while_a_rank_is_lost_fail_until_it_is_restored():
    tracker = JobTracker(num_ranks=2)
    tracker.lose_rank(0)
    finished = tracker.complete(Completion(open_job(tracker).id, 1))
    assert finished is not None
    assert finished.failed_pages == {0, 1, 2}
    tracker.restore_rank(0)
    job = open_job(tracker)
    tracker.complete(Completion(job.id, 1))
    finished = tracker.complete(Completion(job.id, 0))
    assert finished is not None
    assert not finished.failed_pages


def test_without_any_rank_no_job_can_be_opened():
    tracker = JobTracker(num_ranks=1)
    tracker.lose_rank(0)
    with pytest.raises(ConfigError, match="no rank is left"):
        open_job(tracker)


@pytest.mark.parametrize(
    "completion",
    [
        Completion(7, 0),
        Completion(0, 5),
        Completion(0, -1),
        Completion(-1, 0),
        Completion(0, 0, (3,)),
        Completion(0, 0, (-1,)),
    ],
)
def test_an_answer_that_no_job_can_have_is_refused_and_changes_nothing(completion):
    tracker = JobTracker(num_ranks=1)
    job = open_job(tracker)
    with pytest.raises(ConfigError):
        tracker.complete(completion)
    assert tracker.jobs() == [job]


@pytest.mark.parametrize(
    "parts",
    [
        (JobKind.PERSIST, (), ()),
        (JobKind.PERSIST, (1, 2), ()),
        (JobKind.OFFLOAD, (1, 2, 3), ()),
        (JobKind.LOAD, (1, 2, 3), (1, 2, 3, 4)),
        (JobKind.LOOKUP, (1, 2, 3), ()),
        (JobKind.DROP, (), (1, 2, 3)),
    ],
)
def test_a_job_whose_parts_do_not_fit_is_refused(parts):
    kind, host_pages, device_blocks = parts
    with pytest.raises(ConfigError, match="do not fit together"):
        Job(0, kind, b"n" * 32, 0, KEYS, host_pages, device_blocks)


def test_messages_survive_a_process_boundary():
    job = Job(3, JobKind.LOAD, b"n" * 32, 0, KEYS, (1, 2, 3), (7, 8, 9, 10, 11, 12))
    answer = Completion(3, 1, (2,), "because", 12, 0.5)
    assert pickle.loads(pickle.dumps((job, answer))) == (job, answer)
    assert job.page_key(1).chain_hash == KEYS[1]


@given(st.permutations(range(4)), st.lists(st.sets(st.integers(0, 2)), min_size=4, max_size=4), st.data())
def test_the_outcome_does_not_depend_on_order_or_repetition(order, failures, data):
    tracker = JobTracker(num_ranks=4)
    job = open_job(tracker)
    outcomes = []
    for rank in order:
        answer = Completion(job.id, rank, tuple(sorted(failures[rank])))
        for _ in range(data.draw(st.integers(1, 3))):
            outcomes.append(tracker.complete(answer))
    finished = [outcome for outcome in outcomes if outcome is not None]
    assert len(finished) == 1
    assert finished[0].failed_pages == set().union(*failures)


PAGES = frozenset(range(5))
LONG_KEYS = tuple(bytes([i]) * 32 for i in PAGES)


@st.composite
def answers_in_parts(draw, num_ranks: int):
    """Each rank's answers in order, the last about all pages, and which pages it fails."""
    scripts = []
    for rank in range(num_ranks):
        failed = draw(st.sets(st.sampled_from(sorted(PAGES))))
        pending, parts = PAGES, []
        for _ in range(draw(st.integers(0, 3))):
            pending = frozenset(draw(st.sets(st.sampled_from(sorted(pending))))) if pending else pending
            if pending:
                told = tuple(sorted(failed - pending))
                parts.append(Completion(0, rank, told, "lost" if told else None, 0, 0.0, tuple(sorted(pending))))
        scripts.append(([*parts, Completion(0, rank, tuple(sorted(failed)), bytes=10, seconds=rank)], failed))
    return scripts


@given(answers_in_parts(3), st.data())
def test_each_page_is_finished_once_when_every_rank_has_answered_it(scripts, data):
    tracker = JobTracker(num_ranks=3)
    tracker.open(JobKind.PREFETCH, b"n" * 32, 0, LONG_KEYS, range(len(LONG_KEYS)))
    answered = {rank: frozenset() for rank in range(3)}
    finished = {}
    lasts = 0
    while any(parts for parts, _ in scripts):
        rank = data.draw(st.sampled_from([rank for rank, (parts, _) in enumerate(scripts) if parts]))
        answer = scripts[rank][0].pop(0)
        answered[rank] |= PAGES - set(answer.pending_pages)
        for _ in range(data.draw(st.integers(1, 2))):  # a duplicate does no harm
            part = tracker.complete(answer)
            if part is None:
                continue
            pages = PAGES if part.pages is None else part.pages
            assert not pages & finished.keys(), "a page is finished once"
            finished |= {page: page in part.failed_pages for page in pages}
            lasts += part.is_last
            assert (part.bytes, part.seconds) == ((30, 2.0) if part.is_last else (0, 0.0))
        assert finished.keys() == frozenset.intersection(*answered.values())
    assert lasts == 1
    assert {page for page, failed in finished.items() if failed} == set().union(*(failed for _, failed in scripts))
    assert tracker.num_open == 0


def test_a_rank_that_is_lost_after_a_part_fails_the_rest_only():
    tracker = JobTracker(num_ranks=2)
    job = tracker.open(JobKind.PREFETCH, b"n" * 32, 0, LONG_KEYS, range(len(LONG_KEYS)))
    assert tracker.complete(Completion(job.id, 1)) is None
    part = tracker.complete(Completion(job.id, 0, pending_pages=(3, 4)))
    assert part is not None
    assert (part.pages, part.failed_pages, part.is_last) == ({0, 1, 2}, frozenset(), False)
    (rest,) = tracker.lose_rank(0)
    assert (rest.pages, rest.failed_pages, rest.is_last) == ({3, 4}, {3, 4}, True)
    other = open_job(tracker)
    with pytest.raises(ConfigError, match="no such page"):
        tracker.complete(Completion(other.id, 1, pending_pages=(7,)))
