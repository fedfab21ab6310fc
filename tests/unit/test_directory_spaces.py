"""The directory as a whole: spaces, clearing, hints, events, figures, memory, and the audit that sees what is wrong."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
from directory_model import keys_of, namespace
from directory_support import DEVICE, FORK, HOST, STORAGE, A, B, directory, fill

from kvhoist.control.directory import Directory, Event
from kvhoist.errors import ConfigError, PageIdError


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


def test_a_dropped_space_is_forgotten_and_its_name_makes_another() -> None:
    made, space = directory(host=8)
    fill(made, space, A[:2])
    filling = made.reserve(space, A, 2, 3, HOST)
    assert made.drop_space(space) == 2
    assert not made.owns(space)
    assert made.stats().spaces == 0
    made.audit()
    again = made.space(namespace(0), 0)
    assert again is not space
    assert again.serial != space.serial
    assert made.match(again, A) == []
    assert made.publish(filling, HOST) == []
    assert made.stats().tiers["host"].free_pages == 8
    made.audit()
