"""The directory, act by act: what is visible when, what may go, what each error says and leaves as it was."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
from directory_model import keys_of, namespace

from kvhoist.control.directory import Directory, Entry, Event, Space
from kvhoist.control.tiers import Tier
from kvhoist.errors import ConfigError, PageIdError

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE
A = keys_of((0,) * 8)
FORK = keys_of((0, 0, 0, 1, 1, 1))
B = keys_of((5,) * 8)


def directory(host: int = 8, device: int = 8, **options: Any) -> tuple[Directory, Space]:
    made = Directory({HOST: host, DEVICE: device}, **options)
    return made, made.space(namespace(0), 0)


def fill(made: Directory, space: Space, keys: list[bytes], tier: Tier = HOST, start: int = 0) -> list[Entry]:
    return made.publish(made.reserve(space, keys, start, len(keys), tier), tier)


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


def test_spaces_do_not_see_each_other() -> None:
    made, space = directory()
    other = made.space(namespace(1), 0)
    assert made.space(namespace(0), 1) is not space
    assert made.space(namespace(0), 0) is space
    fill(made, space, A[:3])
    assert made.match(other, A) == []


def test_clear_leaves_the_pages_in_flight_to_their_owners_and_to_nobody_else() -> None:
    made, space = directory(host=8)
    pinned = fill(made, space, A[:3])
    made.pin(pinned[1:2], HOST)
    filling = made.reserve(space, FORK, 3, 5, HOST)
    pages = [entry.page(HOST) for entry in (*pinned[1:2], *filling)]
    assert made.clear(space) == 2
    assert made.match(space, A) == []
    again = fill(made, space, A[:3])
    assert not {entry.page(HOST) for entry in again} & set(pages)
    made.audit()
    assert made.publish(filling[:1], HOST) == []
    made.fail(filling[1:], HOST, "late")
    made.unpin(pinned[1:2], HOST)
    assert made.match(space, A) == again
    assert made.stats().tiers["host"].free_pages == 5
    made.audit()


def test_clear_of_one_space_leaves_the_others() -> None:
    made, space = directory()
    other = made.space(namespace(1), 0)
    fill(made, space, A[:3])
    fill(made, other, A[:2])
    assert made.clear(space) == 3
    assert len(made.match(other, A)) == 2
    assert made.clear() == 2
    assert made.stats().entries == 0


def test_forget_takes_exactly_a_closed_set_or_nothing() -> None:
    made, space = directory()
    entries = fill(made, space, A[:4])
    with pytest.raises(PageIdError, match="cannot be forgotten"):
        made.forget(entries[1:3], HOST)
    assert len(made.match(space, A)) == 4
    made.forget(entries[2:], HOST)
    assert made.match(space, A) == entries[:2]
    made.audit()


def test_victims_shows_what_evict_takes_and_takes_nothing() -> None:
    made, space = directory()
    fill(made, space, A[:4])
    fill(made, space, FORK, start=3)
    shown = [entry.key for entry in made.victims(HOST, 5)]
    assert [entry.key for entry in made.victims(HOST, 5)] == shown
    assert made.stats().tiers["host"].ready_pages == 7
    assert [key for key, _ in made.evict(HOST, 5)] == shown


def test_storage_hints_count_as_hits_and_the_oldest_are_forgotten_beyond_their_number() -> None:
    made = Directory({HOST: 4, STORAGE: 3})
    space = made.space(namespace(0), 0)
    assert made.set_stored(space, A[:3], True, start=0) == 3
    assert len(made.match(space, A)) == 3
    assert made.set_stored(space, B[:2], True, start=0) == 2
    assert len(made.match(space, A)) == 1
    assert made.set_stored(space, A[4:6], True) == 0
    made.audit()


def test_a_hint_in_the_middle_may_go_alone() -> None:
    made, space = directory()
    made.set_stored(space, A[:4], True, start=0)
    assert made.set_stored(space, A[1:2], False, "bit flip") == 1
    assert len(made.match(space, A)) == 1
    assert made.set_stored(space, A[1:2], True) == 1
    assert len(made.match(space, A)) == 4
    made.audit()


def test_events_tell_of_each_tier_once_a_call() -> None:
    made, space = directory(host=4)
    heard: list[Event] = []
    unsubscribe = made.subscribe(heard.append)
    fill(made, space, A[:3])
    made.evict(HOST, 2)
    made.set_stored(space, A[:1], True)
    made.clear()
    digest = namespace(0).digest
    assert heard == [
        Event("stored", HOST, digest, 0, tuple(A[:3])),
        Event("removed", HOST, digest, 0, (A[2], A[1])),
        Event("stored", STORAGE, digest, 0, (A[0],)),
        Event("removed", HOST, digest, 0, (A[0],)),
        Event("removed", STORAGE, digest, 0, (A[0],)),
    ]
    unsubscribe()
    unsubscribe()
    fill(made, space, A[:3])
    assert len(heard) == 5


def test_a_subscriber_that_raises_is_counted_logged_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    made, space = directory()
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("no")

    made.subscribe(broken)
    made.subscribe(heard.append)
    with caplog.at_level(logging.ERROR):
        fill(made, space, A[:3])
    assert len(made.match(space, A)) == 3
    assert len(heard) == made.stats().subscriber_errors == len(caplog.records) == 1


def test_tiers_that_the_directory_does_not_own_are_refused() -> None:
    with pytest.raises(ConfigError, match="tiers of a directory"):
        Directory({DEVICE: 4})
    made = Directory({HOST: 4})
    with pytest.raises(ConfigError, match="does not own the tier device; valid choices: host, storage"):
        made.reserve(made.space(namespace(0), 0), A, 0, 1, DEVICE)


def test_stats_are_plain_data() -> None:
    made, space = directory()
    fill(made, space, A[:3])
    made.reserve(space, B, 0, 2, HOST)
    host = made.stats().to_dict()["tiers"]["host"]
    assert (host["ready_pages"], host["filling_pages"], host["free_pages"], host["stored_pages"]) == (3, 2, 3, 3)


def test_the_garbage_collector_sees_no_entry_and_reference_counting_frees_them_all() -> None:
    made, space = directory(host=64)
    entries = fill(made, space, keys_of((0,) * 64))
    assert not any(gc.is_tracked(entry) for entry in entries)
    assert not any(gc.is_tracked(shard) for shard in space.shards)
    gone = weakref.ref(made)
    gc.disable()
    try:
        del made
        assert gone() is None
    finally:
        gc.enable()


def test_a_chain_of_a_hundred_thousand_pages_is_dropped_without_recursion() -> None:
    made = Directory({HOST: 100_000})
    space = made.space(namespace(0), 0)
    keys = [number.to_bytes(8, "big") for number in range(100_000)]
    assert len(fill(made, space, keys)) == 100_000
    made.clear()
    fill(made, space, keys)
    del made


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda entry: setattr(entry, "busy", entry.busy + 1), "miscounted"),
        (lambda entry: setattr(entry, "flags", 0), "tombstone|index|miscounted|pinned"),
        (lambda entry: entry.space.shards[entry.key[-1] & 15].pop(entry.key), "not in the index"),
        (lambda entry: entry.space.columns[HOST].__setitem__(entry.row, 5), "held twice|leaked"),
        (lambda entry: setattr(entry, "key", b"other"), "wrong row"),
    ],
)
def test_audit_names_what_does_not_add_up(spoil: Any, named: str) -> None:
    made, space = directory()
    entries = fill(made, space, A[:3])
    made.audit()
    spoil(entries[2])
    with pytest.raises(PageIdError, match=named):
        made.audit()
