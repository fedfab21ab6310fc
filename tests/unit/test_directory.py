"""The directory, act by act: what is visible when, what may go, what each error says and leaves as it was."""

from __future__ import annotations

import pytest
from directory_model import keys_of
from directory_support import DEVICE, FORK, HOST, A, B, directory, fill

from kvhoist.control.tiers import Tier
from kvhoist.errors import ConfigError, PageIdError


def test_pages_being_filled_are_invisible_until_published() -> None:
    made, space = directory()
    entries = made.reserve(space, A[:3], 0, 3, HOST)
    assert made.match(space, A) == []
    assert all(entry.is_filling(HOST) and not entry.is_ready(HOST) for entry in entries)
    assert made.publish(entries, HOST) == entries
    assert made.match(space, A) == entries
    made.audit()


def test_a_match_ends_at_the_first_page_that_no_tier_has_ready() -> None:
    made, space = directory()
    entries = made.reserve(space, A[:4], 0, 4, HOST)
    made.publish([entries[0], entries[1], entries[3]], HOST)
    assert made.match(space, A) == entries[:2]
    made.fail([entries[2]], HOST, "torn")
    assert made.match(space, A) == entries[:2]
    made.audit()


def test_a_failed_page_is_never_visible_and_its_id_is_free_again() -> None:
    made, space = directory(host=4)
    entries = made.reserve(space, A[:4], 0, 4, HOST)
    pages = [entry.page(HOST) for entry in entries]
    assert sorted(pages) == [0, 1, 2, 3]
    made.fail(entries, HOST, "rank 1 lost")
    assert made.find(space, A[0]) is None
    assert made.stats().tiers["host"].free_pages == 4
    assert all(entry.page(HOST) is None for entry in entries)
    made.audit()


def test_a_page_may_be_in_several_tiers_and_leave_them_one_by_one() -> None:
    made, space = directory()
    fill(made, space, A[:2], DEVICE)
    fill(made, space, A[:2], HOST)
    made.set_stored(space, A[:2], True)
    entry = made.match(space, A)[1]
    assert all(entry.is_ready(tier) for tier in Tier)
    assert [key for key, _ in made.evict(HOST, 9)] == [A[1], A[0]]
    assert entry.is_ready(DEVICE)
    assert entry.page(HOST) is None
    made.evict(DEVICE, 9)
    assert made.match(space, A) == [entry.parent, entry]
    made.set_stored(space, A[:2], False, "quarantined")
    assert made.match(space, A) == []
    assert made.stats().entries == 0
    made.audit()


def test_a_parent_is_never_evicted_before_its_children_even_when_it_was_used_less() -> None:
    made, space = directory()
    entries = fill(made, space, A[:4])
    made.touch(entries[3:])
    assert [key for key, _ in made.evict(HOST, 3)] == [A[3], A[2], A[1]]
    made.audit()


def test_a_page_above_a_hole_is_not_evicted_before_the_pages_below_it() -> None:
    made, space = directory()
    entries = made.reserve(space, A[:4], 0, 4, HOST)
    made.publish([entries[0], entries[1], entries[3]], HOST)
    made.fail([entries[2]], HOST, "torn")
    made.pin(entries[3:], HOST)
    assert made.evict(HOST, 9) == []
    made.unpin(entries[3:], HOST)
    assert [key for key, _ in made.evict(HOST, 9)] == [A[3], A[1], A[0]]
    assert made.stats().entries == 0


def test_pins_are_counted_per_tier_and_keep_a_page_and_all_above_it() -> None:
    made, space = directory()
    fill(made, space, A[:3], DEVICE)
    entries = fill(made, space, A[:3], HOST)
    made.pin(entries[1:2], HOST)
    made.pin(entries[1:2], HOST)
    assert [key for key, _ in made.evict(HOST, 9)] == [A[2]]
    assert len(made.evict(DEVICE, 9)) == 3
    made.unpin(entries[1:2], HOST)
    assert made.evict(HOST, 9) == []
    made.unpin(entries[1:2], HOST)
    assert len(made.evict(HOST, 9)) == 2


def test_a_persist_in_flight_pins_only_the_host_copy_and_a_load_both_ends() -> None:
    made, space = directory(device=3)
    source = fill(made, space, A[:3], HOST)
    made.pin(source, HOST)
    destination = made.reserve(space, A[:3], 0, 3, DEVICE)
    assert made.evict(HOST, 9) == []
    assert made.evict(DEVICE, 9) == []
    made.publish(destination, DEVICE)
    assert len(made.evict(DEVICE, 9)) == 3
    assert made.evict(HOST, 9) == []
    made.unpin(source, HOST)


def test_one_unpin_too_many_is_an_error() -> None:
    made, space = directory()
    entries = fill(made, space, A[:2])
    made.pin(entries, HOST)
    made.unpin(entries, HOST)
    with pytest.raises(PageIdError, match="cannot be unpinned"):
        made.unpin(entries, HOST)
    made.audit()


def test_only_ready_copies_can_be_pinned_and_a_refused_pin_pins_none() -> None:
    made, space = directory()
    ready = fill(made, space, A[:2])
    filling = made.reserve(space, A[:3], 2, 3, HOST)
    with pytest.raises(PageIdError, match="cannot be pinned"):
        made.pin([*ready, *filling], HOST)
    with pytest.raises(PageIdError, match="cannot be unpinned"):
        made.unpin(filling, HOST)
    with pytest.raises(PageIdError, match="cannot be pinned"):
        made.pin(ready, DEVICE)
    made.fail(filling, HOST, "x")
    assert len(made.evict(HOST, 9)) == 2


def test_an_evicted_entry_in_somebodys_hands_never_becomes_another_page() -> None:
    made, space = directory(host=4)
    stale = fill(made, space, A[:4])
    made.evict(HOST, 4)
    fresh = fill(made, space, B[:4])
    assert not set(stale) & set(fresh)
    assert all(not entry.is_ready(HOST) and entry.page(HOST) is None for entry in stale)
    with pytest.raises(PageIdError, match="cannot be pinned"):
        made.pin(stale, HOST)
    made.touch(stale)
    made.audit()


def test_an_evicted_entry_that_nobody_holds_serves_again() -> None:
    made, space = directory(host=4)
    fill(made, space, A[:4])
    before = {id(made.find(space, key)) for key in A[:4]}
    fill(made, space, B[:4])
    assert {id(made.find(space, key)) for key in B[:4]} == before
    made.audit()


def test_reserve_skips_what_the_tier_has_and_makes_parents_that_hold_nothing() -> None:
    made, space = directory()
    entries = made.reserve(space, A[:5], 3, 5, HOST)
    assert [entry.key for entry in entries] == A[3:5]
    above = made.find(space, A[2])
    assert above is not None
    assert above.page(HOST) is None
    made.publish(entries, HOST)
    assert made.match(space, A) == []
    assert [entry.key for entry in made.reserve(space, A[:6], 0, 6, HOST)] == [*A[:3], A[5]]
    made.audit()


def test_reserve_never_evicts_its_own_chain_and_returns_what_fits() -> None:
    made, space = directory(host=4)
    fill(made, space, A[:3])
    entries = made.reserve(space, A[:6], 3, 6, HOST)
    assert [entry.key for entry in entries] == A[3:4]
    assert made.match(space, A)[-1].key == A[2]
    assert made.reserve(space, A[:6], 4, 6, HOST) == []
    made.publish(entries, HOST)
    made.audit()


def test_reserve_survives_that_eviction_removes_the_end_of_its_chain() -> None:
    made, space = directory(host=3)
    first = fill(made, space, FORK[:4], HOST, start=3)
    assert made.find(space, A[2]) is first[0].parent
    entries = made.reserve(space, A[:6], 3, 6, HOST)
    assert [entry.key for entry in entries] == A[3:6]
    made.publish(entries, HOST)
    assert made.find(space, FORK[3]) is None
    made.audit()


def test_nothing_is_reserved_where_all_is_pinned_and_a_full_tier_keeps_evicting_otherwise() -> None:
    made, space = directory(host=3)
    entries = fill(made, space, A[:3])
    made.pin(entries, HOST)
    assert made.reserve(space, B, 0, 3, HOST) == []
    made.unpin(entries, HOST)
    for branch in range(1, 9):
        chain = keys_of((branch,) * 3)
        assert len(fill(made, space, chain)) == 3
    made.audit()


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 9)])
def test_a_range_outside_of_the_keys_is_refused(start: int, stop: int) -> None:
    made, space = directory()
    with pytest.raises(ConfigError, match="range outside of the keys"):
        made.reserve(space, A, start, stop, HOST)


def test_publishing_or_failing_twice_is_an_error_and_harmless() -> None:
    made, space = directory()
    entries = made.reserve(space, A[:3], 0, 3, HOST)
    made.publish(entries[:2], HOST)
    with pytest.raises(PageIdError, match="cannot be published"):
        made.publish(entries[:1], HOST)
    with pytest.raises(PageIdError, match="cannot be failed"):
        made.fail(entries, HOST, "late")
    assert made.match(space, A) == entries[:2]
    with pytest.raises(PageIdError, match="cannot be failed"):
        made.fail([entries[2]], HOST, "again")
    made.audit()
    assert made.stats().tiers["host"].free_pages == 6


def test_keys_that_are_no_chain_are_refused_not_matched() -> None:
    made, space = directory()
    fill(made, space, A[:4])
    with pytest.raises(PageIdError, match="not one chain"):
        made.match(space, A[2:4])
