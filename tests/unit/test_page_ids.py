"""Every page id is free or held: given out once, taken back once, counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhoist.control.page_ids import PageIds
from kvhoist.errors import CapacityError, ConfigError, PageIdError


def test_ids_given_out_are_distinct_and_within_the_tier() -> None:
    ids = PageIds(5)
    given_out = ids.allocate(2) + ids.allocate(3)
    assert sorted(given_out) == [0, 1, 2, 3, 4]
    assert (ids.num_free, ids.num_held) == (0, 5)


def test_more_than_is_free_gives_out_none() -> None:
    ids = PageIds(3)
    ids.allocate(2)
    with pytest.raises(CapacityError, match="got 2; expected at most 1"):
        ids.allocate(2)
    assert ids.num_free == 1


def test_a_double_free_is_an_error_and_frees_nothing_twice() -> None:
    ids = PageIds(3)
    first, second = ids.allocate(2)
    ids.free([first])
    with pytest.raises(PageIdError, match="not held"):
        ids.free([first])
    with pytest.raises(PageIdError, match="not held"):
        ids.free([second, second])
    assert ids.num_free == 3
    ids.audit([])


@pytest.mark.parametrize("page", [-1, 3, 1 << 40])
def test_a_foreign_id_is_an_error(page: int) -> None:
    ids = PageIds(3)
    ids.allocate(3)
    with pytest.raises(PageIdError, match="never was one of this tier"):
        ids.free([page])


def test_an_id_not_yet_given_out_cannot_be_freed() -> None:
    ids = PageIds(3)
    ids.allocate(1)
    with pytest.raises(PageIdError, match="not held"):
        ids.free([2])


def test_audit_finds_leaks_and_foreign_and_repeated_ids() -> None:
    ids = PageIds(4)
    held = ids.allocate(3)
    ids.audit(held)
    with pytest.raises(PageIdError, match="leaked"):
        ids.audit(held[:2])
    with pytest.raises(PageIdError, match="free or foreign"):
        ids.audit([*held, 3])
    with pytest.raises(PageIdError, match="held twice"):
        ids.audit([*held, held[0]])


@pytest.mark.parametrize("num_pages", [-1, (1 << 28) + 1, 1.5, "8", True])
def test_absurd_numbers_of_pages_are_refused(num_pages: object) -> None:
    with pytest.raises(ConfigError, match="number of pages"):
        PageIds(num_pages)  # type: ignore[arg-type]


@given(st.lists(st.integers(-6, 6), max_size=40))
def test_free_and_held_partition_the_ids(amounts: list[int]) -> None:
    ids, held = PageIds(20), []
    for amount in amounts:
        if amount >= 0:
            held += ids.allocate(min(amount, ids.num_free))
        else:
            back, held = held[:-amount], held[-amount:]
            ids.free(back)
        ids.audit(held)
        assert ids.num_free + ids.num_held == 20
        assert all(ids.is_held(page) == (page in held) for page in range(20))
