"""The control plane of several ranks: no rank decides, a page is ready when every rank confirmed it."""

from __future__ import annotations

import pytest
from support import PAGE_TOKENS, namespace, tiny_geometry

from kvhoist.control.directory import Directory
from kvhoist.control.jobs import JobTracker
from kvhoist.control.keys import chain_hashes
from kvhoist.control.offers import Offer
from kvhoist.control.plane import ControlPlane
from kvhoist.control.policy import WritePolicy
from kvhoist.control.tiers import Tier
from kvhoist.errors import ConfigError, PageIdError, PolicyError
from kvhoist.messages import Completion, Job, JobKind

TOKENS = list(range(6 * PAGE_TOKENS))
KEYS = chain_hashes(TOKENS, PAGE_TOKENS)
BLOCKS = list(range(40, 46))


def make_plane(*, num_ranks: int = 2, host_pages: int = 8, policy: str = "write_through", storage: bool = False):
    geometry = tiny_geometry()
    clock = [0.0]
    plane = ControlPlane(
        geometry.groups[0],
        Directory({Tier.HOST: host_pages}),
        WritePolicy.parse(policy, device_owned=False),
        device_owned=False,
        num_ranks=num_ranks,
        has_storage=storage,
        clock=lambda: clock[0],
    )
    return plane, plane.space(namespace(geometry)), clock


def answer(plane: ControlPlane, job: Job, *ranks: int, failed: tuple[int, ...] = ()) -> None:
    for rank in ranks:
        plane.complete(Completion(job.id, rank, failed, "disk on fire" if failed else None))


def offloaded(plane, space):
    job = plane.offload(space, KEYS, 0, len(KEYS), BLOCKS)
    assert job is not None
    assert plane.take_jobs() == [job]
    return job


def test_pages_are_ready_when_every_rank_confirmed_and_not_before():
    plane, space, _ = make_plane()
    job = offloaded(plane, space)
    assert job.device_blocks == tuple(BLOCKS)
    answer(plane, job, 1)
    answer(plane, job, 1)
    assert plane.directory.match(space, KEYS) == []
    answer(plane, job, 0)
    assert len(plane.directory.match(space, KEYS)) == 6
    plane.audit()


def test_one_ranks_failed_page_is_a_miss_of_that_page_on_all():
    plane, space, _ = make_plane()
    job = offloaded(plane, space)
    answer(plane, job, 0, failed=(2,))
    answer(plane, job, 1)
    assert len(plane.directory.match(space, KEYS)) == 2
    assert "disk on fire" in str(plane.explain(space, KEYS, len(TOKENS)))
    plane.audit()
    again = plane.offload(space, KEYS, 0, len(KEYS), BLOCKS)
    assert again is not None
    assert again.keys == (KEYS[2],), "only what is lacking moves again"
    assert again.device_blocks == (BLOCKS[2],)


def test_a_lost_rank_leaves_no_page_visible_and_no_page_id_behind():
    plane, space, _ = make_plane()
    job = offloaded(plane, space)
    answer(plane, job, 0)
    finished = plane.lose_rank(1)
    assert [one.job for one in finished] == [job]
    assert plane.directory.match(space, KEYS) == []
    plane.audit()
    assert plane.directory.stats().tiers["host"].free_pages == 8


def test_a_restored_rank_starts_with_an_empty_host_tier():
    plane, space, _ = make_plane()
    answer(plane, offloaded(plane, space), 0, 1)
    plane.lose_rank(1)
    assert plane.restore_rank(1) == 6
    assert plane.directory.match(space, KEYS) == []
    answer(plane, offloaded(plane, space), 0, 1)
    assert len(plane.directory.match(space, KEYS)) == 6
    plane.audit()


def test_a_restored_rank_is_not_asked_for_pages_that_were_in_use_when_it_was_lost():
    plane, space, _ = make_plane()
    answer(plane, offloaded(plane, space), 0, 1)
    load = plane.load(space, KEYS, 0, 6, BLOCKS)
    assert load is not None
    plane.restore_rank(1)
    answer(plane, load, 0)
    assert plane.directory.match(space, KEYS) == [], "its host memory is new: these pages are not there"
    assert plane.directory.stats().tiers["host"].free_pages == 8
    plane.audit()


def test_no_such_rank_can_be_restored():
    plane, _, _ = make_plane()
    with pytest.raises(ConfigError, match="no such rank"):
        plane.restore_rank(2)


@pytest.mark.parametrize("fault", ["blocks", "ranks"])
def test_a_job_that_cannot_be_opened_takes_its_reservations_back(fault):
    plane, space, _ = make_plane(storage=True)
    if fault == "ranks":
        plane.lose_rank(0)
        plane.lose_rank(1)
    with pytest.raises(ConfigError):
        plane.offload(space, KEYS, 0, 6, BLOCKS[: 6 if fault == "ranks" else 3])
    assert plane.directory.stats().tiers["host"].free_pages == 8
    plane.audit()


def test_a_question_that_hangs_is_not_asked_again():
    plane, space, clock = make_plane(storage=True)
    first = plane.lookup(space, KEYS, 0)
    clock[0] = 100.0
    assert plane.lookup(space, KEYS, 0) is None
    answer(plane, first, 0, 1, failed=tuple(range(6)))
    assert plane.lookup(space, KEYS, 0) is not None


def test_a_load_pins_its_host_source_until_every_rank_has_it():
    plane, space, _ = make_plane()
    answer(plane, offloaded(plane, space), 0, 1)
    load = plane.load(space, KEYS, 0, 6, BLOCKS)
    assert load is not None
    answer(plane, load, 0)
    assert plane.directory.evict(Tier.HOST, 8) == []
    answer(plane, load, 1)
    assert len(plane.directory.evict(Tier.HOST, 8)) == 6
    plane.audit()


def test_a_load_of_a_page_that_is_not_ready_is_refused_and_changes_nothing():
    plane, space, _ = make_plane()
    offloaded(plane, space)
    with pytest.raises(PageIdError, match="not ready in the host tier"):
        plane.load(space, KEYS, 0, 1, BLOCKS[:1])
    plane.audit()
    assert plane.take_jobs() == []


def test_pages_that_reach_the_host_are_persisted_once():
    plane, space, _ = make_plane(storage=True)
    answer(plane, offloaded(plane, space), 0, 1)
    (persist,) = plane.take_jobs()
    assert persist.kind is JobKind.PERSIST
    entries = plane.directory.match(space, KEYS)
    assert plane.persist(entries) is None, "it is under way"
    answer(plane, persist, 0, 1)
    assert plane.persist(entries) is None, "it is stored"
    assert all(entry.is_ready(Tier.STORAGE) for entry in entries)
    plane.audit()


def test_what_storage_says_it_holds_is_a_hint_that_a_failed_prefetch_takes_back():
    plane, space, _ = make_plane(storage=True)
    lookup = plane.lookup(space, KEYS, 0)
    assert lookup is not None
    answer(plane, lookup, 0)
    answer(plane, lookup, 1, failed=(4, 5))
    assert len(plane.directory.match(space, KEYS)) == 4, "what one rank lacks, all lack"
    prefetch = plane.prefetch(space, KEYS, 0, 4)
    assert prefetch is not None
    answer(plane, prefetch, 0, failed=(3,))
    answer(plane, prefetch, 1)
    entries = plane.directory.match(space, KEYS)
    assert len(entries) == 3
    assert all(entry.is_ready(Tier.HOST) for entry in entries)
    plane.audit()


def test_storage_is_not_asked_the_same_again_at_once():
    plane, space, clock = make_plane(storage=True)
    first = plane.lookup(space, KEYS, 0)
    assert first is not None
    assert plane.lookup(space, KEYS, 0) is None
    answer(plane, first, 0, 1, failed=tuple(range(6)))
    clock[0] = 5.0
    assert plane.lookup(space, KEYS, 0) is not None
    assert plane.lookup(space, KEYS, 6) is None, "nothing to ask"


def test_a_full_host_tier_takes_what_fits_and_says_what_did_not():
    plane, space, _ = make_plane(host_pages=4)
    job = plane.offload(space, KEYS, 0, 6, BLOCKS)
    assert job is not None
    assert job.keys == tuple(KEYS[:4])
    assert job.device_blocks == tuple(BLOCKS[:4])
    answer(plane, job, 0, 1)
    assert "host tier had no page to give" in str(plane.explain(space, KEYS, len(TOKENS)))
    plane.audit()


def test_selective_offers_of_a_foreign_engine_count_as_hits():
    plane, space, _ = make_plane(policy="write_through_selective")
    assert plane.write(space, KEYS, 0, 6, BLOCKS) is None
    assert plane.write(space, KEYS, 0, 3, BLOCKS[:3]) is None
    job = plane.write(space, KEYS, 0, 6, BLOCKS)
    assert job is not None
    assert job.keys == tuple(KEYS[:3]), "the others were offered twice only"
    plane.audit()


def test_write_back_on_a_foreign_tier_is_refused():
    with pytest.raises(PolicyError, match="needs a device tier that kvhoist owns"):
        WritePolicy.parse("write_back", device_owned=False)


def test_an_answer_of_storage_for_a_space_that_was_dropped_makes_no_entries():
    plane, space, _ = make_plane(storage=True)
    lookup = plane.lookup(space, KEYS, 0)
    assert lookup is not None
    plane.directory.drop_space(space)
    answer(plane, lookup, 0, 1)
    assert plane.directory.stats().entries == 0
    plane.audit()


OTHERS = chain_hashes([9, *TOKENS[1:]], PAGE_TOKENS)


def test_pages_of_several_requests_go_down_as_one_job():
    plane, space, _ = make_plane(num_ranks=1)
    offloaded_already = plane.offload(space, KEYS, 0, 1, BLOCKS[:1])
    assert offloaded_already is not None
    job = plane.write_all(space, [Offer(KEYS, 0, 3, BLOCKS[:3]), Offer(OTHERS, 0, 2, [7, 8])])
    assert job is not None
    assert job.keys == (*KEYS[1:3], *OTHERS[:2])
    assert job.device_blocks == (*BLOCKS[1:3], 7, 8)
    assert plane.write_all(space, []) is None
    for one in plane.take_jobs():
        answer(plane, one, 0)
    assert len(plane.directory.match(space, KEYS)) == 3
    assert len(plane.directory.match(space, OTHERS)) == 2
    plane.audit()


def test_a_full_host_tier_gives_room_to_several_requests_at_once_but_not_what_they_continue():
    plane, space, _ = make_plane(num_ranks=1, host_pages=5)
    old = chain_hashes([8, *TOKENS[1:]], PAGE_TOKENS)
    for keys, stop in ((KEYS, 1), (OTHERS, 1), (old, 3)):  # the tips of the first two are the least recently used
        plane.offload(space, keys, 0, stop, BLOCKS[:stop])
        answer(plane, plane.take_jobs()[-1], 0)
    offers = [Offer(KEYS, 1, 2, BLOCKS[:1], "a"), Offer(OTHERS, 1, 2, BLOCKS[1:2], "b")]
    job = plane.write_all(space, offers)
    assert job is not None
    assert job.keys == (KEYS[1], OTHERS[1])
    answer(plane, job, 0)
    assert len(plane.directory.match(space, KEYS)) == len(plane.directory.match(space, OTHERS)) == 2
    assert len(plane.directory.match(space, old)) == 1
    assert "to make room for a, b" in str(plane.explain(space, old, len(TOKENS)))
    plane.audit()


@pytest.mark.parametrize(
    ("where", "call", "at"),
    [
        (Directory, "num_free", 0),
        (Directory, "find", 1),
        (Directory, "pin", 0),
        (Directory, "evict", 0),
        (Directory, "reserve", 0),
        (Directory, "reserve", 1),
        (JobTracker, "open", 0),
    ],
)
def test_an_offload_of_several_requests_that_breaks_off_anywhere_loses_no_page(monkeypatch, where, call, at):
    plane, space, _ = make_plane(num_ranks=1, host_pages=5)
    old = chain_hashes([8, *TOKENS[1:]], PAGE_TOKENS)
    for keys, stop in ((KEYS, 1), (OTHERS, 1), (old, 3)):
        plane.offload(space, keys, 0, stop, BLOCKS[:stop])
        answer(plane, plane.take_jobs()[-1], 0)
    whole, calls = getattr(where, call), iter(range(100))

    def broken(*arguments, **more):
        if next(calls) == at:
            raise MemoryError("planted")
        return whole(*arguments, **more)

    monkeypatch.setattr(where, call, broken)
    with pytest.raises(MemoryError, match="planted"):
        plane.write_all(space, [Offer(KEYS, 1, 2, BLOCKS[:1]), Offer(OTHERS, 1, 2, BLOCKS[1:2])])
    monkeypatch.undo()
    assert plane.take_jobs() == []
    plane.audit()
    plane.directory.evict(Tier.HOST, 5)
    assert plane.directory.num_free(Tier.HOST) == 5


def test_pages_reserved_for_a_job_that_could_not_be_put_together_are_given_back():
    plane, space, _ = make_plane()
    with pytest.raises(ConfigError, match="outside of the keys"):
        plane.write_all(space, [Offer(KEYS, 0, 3, BLOCKS[:3]), Offer(OTHERS, 0, len(OTHERS) + 1, [7])])
    assert plane.take_jobs() == []
    host = plane.directory.stats().tiers["host"]
    assert (host.free_pages, host.filling_pages) == (8, 0)
    plane.audit()
