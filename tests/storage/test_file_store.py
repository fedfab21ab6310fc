"""FileStore: restart, capacity and eviction, size classes, and several stores on one folder."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from kvhoist.errors import ConfigError
from kvhoist.storage.file.segment import file_bytes_of, pitch_of, runs_of, slots_that_fit
from kvhoist.storage.record import identity_of

KIB = 1 << 10
MIB = 1 << 20


def room_for(num_pages: int, page_bytes: int) -> int:
    """Return a capacity whose segments hold exactly `num_pages`, one each."""
    return num_pages * file_bytes_of(pitch_of(page_bytes), 1)


def test_pages_survive_a_restart(stores: Any, pages: Any) -> None:
    store = stores.open()
    pages.put(store, range(50))
    store.close()
    again = stores.open()
    assert pages.read(again, range(51)) == ["good"] * 50 + ["missing"]
    assert again.num_segments() == (1, 0)
    assert again.stats().num_pages == 50


def test_pages_are_in_segments_never_in_files_of_their_own(stores: Any, pages: Any) -> None:
    store = stores.open(capacity="64MiB")
    pages.put(store, range(1000))
    assert len(stores.segments()) <= 2
    assert all(path.stat().st_blocks * 512 >= path.stat().st_size for path in stores.segments()), "preallocated whole"


@pytest.mark.parametrize("capacity", [MIB, 3 * MIB, 10 * MIB])
def test_the_files_never_exceed_capacity(stores: Any, pages_of: Any, capacity: int) -> None:
    store = stores.open(capacity=capacity)
    rng = random.Random(1)
    for step in range(60):
        kind = rng.randrange(3)
        pages = pages_of(page_bytes=[5000, 70_000, 300_000][kind], group=kind)
        pages.put(store, range(step * 8, step * 8 + 8))
        assert sum(path.stat().st_size for path in stores.segments()) <= capacity
        store.audit()
    assert store.stats().used_bytes <= store.stats().capacity_bytes == capacity


def test_the_least_recently_used_page_goes_first(stores: Any, pages: Any) -> None:
    store = stores.open(capacity=room_for(4, pages.page_bytes))
    assert pages.put(store, range(4)) == [True] * 4
    pages.read(store, [0])
    pages.put(store, [1])
    assert pages.put(store, [4, 5]) == [True, True]
    assert store.exists(pages.keys(range(6))) == [True, True, False, False, True, True]
    assert pages.read(store, [0, 1, 4, 5]) == ["good"] * 4
    assert store.stats().evicted_pages == 2


def test_after_a_restart_the_oldest_written_goes_first(stores: Any, pages_of: Any) -> None:
    now = iter(range(100))
    pages = pages_of()
    pages.sealer._clock = lambda: float(next(now))
    store = stores.open(capacity=room_for(4, pages.page_bytes))
    for i in (2, 0, 3, 1):
        pages.put(store, [i])
    store.close()
    again = stores.open(capacity=room_for(4, pages.page_bytes))
    pages.put(again, [4, 5])
    assert again.exists(pages.keys(range(6))) == [False, True, False, True, True, True]


def test_a_batch_larger_than_the_store_keeps_what_fits_and_evicts_none_of_itself(stores: Any, pages: Any) -> None:
    store = stores.open(capacity=room_for(4, pages.page_bytes))
    pages.put(store, [100, 101])
    kept = pages.put(store, range(10))
    assert kept == [True] * 4 + [False] * 6
    assert pages.read(store, range(4)) == ["good"] * 4
    assert store.stats().dropped_pages == 6


def test_a_page_larger_than_the_store_is_dropped_and_evicts_nothing(stores: Any, pages: Any, pages_of: Any) -> None:
    store = stores.open(capacity=MIB)
    huge = pages_of(page_bytes=2 * MIB, group=1)
    pages.put(store, range(5))
    assert huge.put(store, [1]) == [False]
    assert pages.read(store, range(5)) == ["good"] * 5
    assert store.stats().dropped_pages == 1


def test_another_size_takes_over_the_segments_that_were_not_used_for_longest(stores: Any, pages_of: Any) -> None:
    store = stores.open(capacity=2 * MIB)
    old, new = pages_of(page_bytes=10_000), pages_of(page_bytes=30_000, group=1)
    old.put(store, range(200))
    for first in range(0, 400, 20):
        assert all(new.put(store, range(first, first + 20)))
    held = sum(store.exists(new.keys(range(400))))
    assert held >= 50, "the new size got most of the room"
    assert sum(store.exists(old.keys(range(200)))) <= 20


def test_two_sizes_in_use_share_the_room(stores: Any, pages_of: Any) -> None:
    store = stores.open(capacity=4 * MIB)
    small, large = pages_of(page_bytes=8000), pages_of(page_bytes=60_000, group=1)
    for first in range(0, 600, 10):
        assert all(small.put(store, range(first, first + 10)))
        assert all(large.put(store, range(first // 10, first // 10 + 1)))
        assert "good" in small.read(store, [first])
    assert sum(store.exists(small.keys(range(600)))) > 50
    assert sum(store.exists(large.keys(range(60)))) > 5


def test_a_smaller_capacity_adopts_only_what_fits_and_reads_the_rest(stores: Any, pages: Any) -> None:
    store = stores.open(capacity="8MiB")
    pages.put(store, range(500))
    store.close()
    again = stores.open(capacity="2MiB")
    owned, foreign = again.num_segments()
    assert owned <= 2
    assert foreign >= 3
    assert pages.read(again, range(500)) == ["good"] * 500


def test_a_small_process_does_not_delete_the_cache_of_a_large_one_that_is_away(stores: Any, pages: Any) -> None:
    large = stores.open(capacity="8MiB")
    pages.put(large, range(500))
    large.close()
    small = stores.open(capacity="2MiB", orphan_grace_s=0.0)
    for _ in range(3):
        small._neighbours._next_orphan_check = 0.0
        assert small.exists([pages.key(9999)]) == [False]
    assert pages.read(small, range(500)) == ["good"] * 500
    small.close()
    assert pages.read(stores.open(capacity="8MiB"), range(500)) == ["good"] * 500


def test_what_nobody_wrote_to_for_a_week_is_adopted_or_deleted_after_the_grace(stores: Any, pages: Any) -> None:
    store = stores.open(capacity="8MiB")
    pages.put(store, range(500))
    store.close()
    for path in stores.segments():
        os.utime(path, (0, 0))
    again = stores.open(capacity="2MiB", orphan_grace_s=0.0)
    again._neighbours._next_orphan_check = 0.0
    assert again.exists([pages.key(9999)]) == [False]
    assert again.num_segments()[1] == 0
    assert sum(path.stat().st_size for path in stores.segments()) <= 2 * MIB
    held = again.exists(pages.keys(range(500)))
    assert 0 < sum(held) < 500
    assert set(pages.read(again, [i for i in range(500) if held[i]])) == {"good"}


def test_ranks_that_start_together_each_get_their_share_back(stores: Any, pages: Any) -> None:
    ranks = [stores.open(capacity="2MiB") for _ in range(3)]
    for rank, store in enumerate(ranks):
        for first in range(1000 * rank, 1000 * rank + 400, 20):
            assert all(pages.put(store, range(first, first + 20)))
    held = ranks[0].exists(pages.keys(range(3000)))
    assert sum(held) > 600
    for store in ranks:
        store.close()
    again = [stores.open(capacity="2MiB") for _ in range(3)]
    assert all(store.num_segments()[0] > 0 for store in again)
    assert all(store.exists(pages.keys(range(3000))) == held for store in again)
    assert sum(store.stats().used_bytes for store in again) == sum(held) * pitch_of(pages.page_bytes)


def test_two_stores_see_each_others_pages_and_evict_only_their_own(stores: Any, pages: Any) -> None:
    a, b = stores.open(), stores.open(capacity=room_for(3, pages.page_bytes))
    pages.put(a, range(10))
    assert pages.read(b, range(10)) == ["good"] * 10
    assert pages.put(b, range(12)) == [True] * 12, "what the other holds is not written again"
    assert b.stats().put_pages == 2
    pages.put(b, range(20, 30))
    assert pages.read(a, range(10)) == ["good"] * 10
    assert b.remove(pages.keys(range(10))) == 0
    a.remove(pages.keys([0]))
    assert pages.read(b, [0, 1]) == ["missing", "good"]


def test_a_reader_sees_what_is_put_after_it_opened(stores: Any, pages: Any) -> None:
    a = stores.open()
    reader = stores.open(read_only=True)
    for i in range(5):
        assert pages.read(reader, [i]) == ["missing"]
        pages.put(a, [i])
        assert pages.read(reader, [i]) == ["good"]


def test_a_segment_that_its_owner_gave_up_is_forgotten(stores: Any, pages: Any, pages_of: Any) -> None:
    a = stores.open(capacity=MIB)
    b = stores.open(capacity=MIB)
    pages.put(a, range(30))
    assert pages.read(b, range(30)) == ["good"] * 30
    a.remove_namespace(pages.namespace)
    assert stores.segments() == [], "an empty segment gives its disk space back"
    assert b.exists(pages.keys([500])) == [False]
    assert b.num_segments() == (0, 0)
    assert pages.read(b, range(30)) == ["missing"] * 30


def test_neighbours_of_a_batch_lie_in_neighbouring_slots(stores: Any, pages: Any) -> None:
    store = stores.open()
    pages.put(store, range(20))
    places = [store._index.find(key) for key in map(identity_of, pages.keys(range(20)))]
    assert [place.slot for place in places] == list(range(20))
    assert len({id(place.shelf) for place in places}) == 1


def test_options_that_cannot_work_are_refused_before_anything_is_made(stores: Any) -> None:
    for options in ({"fsync": "always"}, {"capacity": 0}, {"capacity": "much"}):
        with pytest.raises(ConfigError):
            stores.open(**options)
    assert not stores.folder.exists()


def test_a_header_of_another_page_is_refused(stores: Any, pages: Any) -> None:
    store = stores.open()
    with pytest.raises(ConfigError, match="not its own"):
        store.put([pages.key(1)], [pages.sealer.seal(pages.key(2), pages.blob(1))], [pages.blob(1)])


@pytest.mark.parametrize("pitch", [4096, 8192, 1 << 20])
@pytest.mark.parametrize("num_bytes", [0, 4096, 16384, 100_000, 10_000_000])
def test_slots_that_fit_is_the_largest_count_that_fits(pitch: int, num_bytes: int) -> None:
    count = slots_that_fit(num_bytes, pitch)
    assert count == 0 or file_bytes_of(pitch, count) <= num_bytes
    assert file_bytes_of(pitch, count + 1) > num_bytes


def test_runs_are_cut_where_slots_are_not_neighbours() -> None:
    assert runs_of([]) == []
    assert runs_of([3]) == [[3]]
    assert runs_of([1, 2, 3, 7, 8, 8, 9, 20]) == [[1, 2, 3], [7, 8], [8, 9], [20]]


def test_segments_that_somebody_deleted_are_given_up(stores: Any, pages: Any) -> None:
    store = stores.open()
    pages.put(store, range(10))
    for path in stores.segments():
        path.unlink()
    store._neighbours._next_orphan_check = 0.0
    assert pages.read(store, [0, 99]) == ["missing", "missing"]
    assert store.num_segments() == (0, 0)
    assert pages.put(store, range(10)) == [True] * 10
    assert stores.segments(), "what is confirmed now lies in a file that stays"
