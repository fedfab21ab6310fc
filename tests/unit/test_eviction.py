"""Eviction policies: each does what its definition says, and an outside one can do no harm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from directory_model import keys_of, namespace

from kvhoist.control.directory import Directory, Entry, Space
from kvhoist.control.eviction import POLICIES, EvictionPolicy, PolicyContext
from kvhoist.control.tiers import Tier
from kvhoist.errors import PolicyError

HOST = Tier.HOST
A, B, C, D = (keys_of((branch,) * 3) for branch in range(4))


def directory(eviction: Any, host: int = 6) -> tuple[Directory, Space]:
    made = Directory({HOST: host}, eviction=eviction)
    return made, made.space(namespace(0), 0)


def fill(made: Directory, space: Space, keys: list[bytes]) -> list[Entry]:
    return made.publish(made.reserve(space, keys, 0, len(keys), HOST), HOST)


@pytest.mark.parametrize("eviction", ["LRU", "", "random", "fifo"])
def test_an_unknown_name_is_refused_with_the_valid_ones(eviction: str) -> None:
    with pytest.raises(PolicyError, match="valid choices: lru, slru, lfu, arc"):
        directory(eviction)


@pytest.mark.parametrize("eviction", POLICIES)
def test_every_policy_goes_on_evicting_when_all_is_full_of_single_pages(eviction: str) -> None:
    made, space = directory(eviction)
    for number in range(40):
        assert len(fill(made, space, keys_of((number,)))) == 1
    made.audit()
    assert made.stats().tiers["host"].evicted_pages == 34


def test_lru_takes_the_chain_used_longest_ago_from_its_end() -> None:
    made, space = directory("lru")
    first = fill(made, space, A)
    fill(made, space, B)
    made.touch(first)
    assert [key for key, _ in made.evict(HOST, 4)] == [B[2], B[1], B[0], A[2]]


def test_lru_order_does_not_depend_on_depth_where_rows_are_used_again() -> None:
    """Rows, hence places in the queue, pass from deep pages to shallow ones and back; parents stay after children."""
    made, space = directory("lru", host=4)
    for round_number in range(30):
        deep, shallow = keys_of((round_number,) * 4), [keys_of((100 + round_number * 4 + i,)) for i in range(4)]
        entries = fill(made, space, deep)
        made.touch(entries[:2])
        assert [entry.key for entry in made.victims(HOST, 4)] == deep[::-1]
        for keys in shallow:
            fill(made, space, keys)
        assert [entry.key for entry in made.victims(HOST, 4)] == [keys[0] for keys in shallow]
        made.audit()


def test_lru_waits_for_a_parent_that_another_branch_uses_later() -> None:
    made, space = directory("lru")
    fork = [A[0], *keys_of((0, 7, 7))[1:]]
    fill(made, space, A)
    made.touch(fill(made, space, fork)[-1:])
    assert [key for key, _ in made.evict(HOST, 9)] == [A[2], A[1], fork[2], fork[1], A[0]]


def test_lfu_takes_the_least_used_and_of_these_the_oldest() -> None:
    made, space = directory("lfu", host=9)
    a, _, c = (fill(made, space, keys) for keys in (A, B, C))
    made.touch(a)
    made.touch(a)
    made.touch(c)
    assert [key for key, _ in made.evict(HOST, 7)] == [*B[::-1], *C[::-1], A[2]]


@pytest.mark.parametrize("eviction", POLICIES)
def test_pages_that_fail_one_above_the_other_are_never_shown_to_the_policy(eviction: str) -> None:
    made, space = directory(eviction)
    made.fail(made.reserve(space, A, 0, 3, HOST), HOST, "torn")
    made.audit()
    assert made.victims(HOST, 3) == []


def test_lfu_counts_anew_when_a_page_returns() -> None:
    made, space = directory("lfu")
    a = fill(made, space, A)
    for _ in range(5):
        made.touch(a)
    made.evict(HOST, 9)
    fill(made, space, A)
    made.touch(fill(made, space, B))
    assert made.evict(HOST, 1)[0][0] == A[2]


def test_slru_lets_pages_that_pass_once_go_before_those_hit() -> None:
    made, space = directory("slru", host=10)
    made.touch(fill(made, space, A))
    fill(made, space, B)
    fill(made, space, C)
    assert [key for key, _ in made.evict(HOST, 7)] == [*B[::-1], *C[::-1], A[2]]


def test_slru_demotes_the_oldest_protected_beyond_their_share() -> None:
    made, space = directory("slru", host=5)  # 4 protected pages
    a = fill(made, space, A)
    made.touch(a)
    b = fill(made, space, B[:2])
    made.touch(b)
    assert [key for key, _ in made.evict(HOST, 2)] == [A[2], A[1]]


def test_arc_prefers_pages_used_again_and_learns_from_what_returns() -> None:
    made, space = directory("arc", host=6)
    made.touch(fill(made, space, A))
    fill(made, space, B)
    fill(made, space, C)  # a scan: B leaves T1 for B1
    assert len(made.match(space, A)) == 3
    policy = made._books[HOST].policy
    assert policy.target == 0.0  # type: ignore[attr-defined]
    fill(made, space, B)  # a miss that B1 knew: recency deserves more
    assert policy.target == 3.0  # type: ignore[attr-defined]
    made.audit()


class Mru(EvictionPolicy):
    """An outside policy: of all leaves the last exposed."""

    def __init__(self, context: PolicyContext) -> None:
        self.tier = context.tier
        self.leaves: dict[Entry, None] = {}

    def exposed(self, entry: Entry) -> None:
        self.leaves.pop(entry, None)
        self.leaves[entry] = None

    def removed(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.leaves.pop(entry, None)

    def choose(self, num_pages: int) -> list[Entry]:
        from kvhoist.control.eviction.base import is_leaf

        return [entry for entry in reversed(self.leaves) if is_leaf(entry, self.tier)][:num_pages]


def test_outside_code_can_bring_a_policy() -> None:
    made, space = directory(Mru)
    fill(made, space, A)
    fill(made, space, B)
    assert [key for key, _ in made.evict(HOST, 4)] == [B[2], A[2], A[1], B[1]]
    made.audit()


def choosing(choose: Callable[[Mru, int], Any]) -> Callable[[PolicyContext], EvictionPolicy]:
    class Broken(Mru):
        def choose(self, num_pages: int) -> list[Entry]:
            answer: list[Entry] = choose(self, num_pages)
            return answer

    return Broken


@pytest.mark.parametrize(
    "choose",
    [
        lambda policy, n: ["page 7"],
        lambda policy, n: [None],
        lambda policy, n: 7,
        lambda policy, n: [next(iter(policy.leaves)).parent],
        lambda policy, n: [next(iter(policy.leaves))] * 2,
        lambda policy, n: 1 / 0,
    ],
    ids=["text", "none", "number", "not a leaf", "twice", "raises"],
)
def test_a_policy_that_answers_nonsense_gets_an_error_and_harms_nothing(choose: Any) -> None:
    made, space = directory(choosing(choose))
    fill(made, space, A)
    fill(made, space, B)
    with pytest.raises(PolicyError, match="Mend the policy"):
        made.evict(HOST, 2)
    with pytest.raises(PolicyError, match="Mend the policy"):
        made.reserve(space, C, 0, 3, HOST)
    made.audit()
    assert made.stats().tiers["host"].filling_pages == 0


def test_a_policy_that_chooses_pinned_filling_stale_or_foreign_pages_harms_nothing() -> None:
    foreign, foreign_space = directory("lru")
    others = fill(foreign, foreign_space, D)
    chosen: list[Entry] = []
    made, space = directory(choosing(lambda policy, n: chosen), host=9)
    stale = fill(made, space, A)
    made.clear()
    pinned, filling = fill(made, space, B), made.reserve(space, C, 0, 3, HOST)
    made.pin(pinned, HOST)
    for one in (stale[2], pinned[2], filling[2], others[2]):
        chosen[:] = [one]
        with pytest.raises(PolicyError, match="chose what may not go"):
            made.evict(HOST, 1)
    chosen[:] = [others[2]]
    with pytest.raises(PolicyError, match="chose what may not go"):
        made.victims(HOST, 1)
    made.audit()
    foreign.audit()
    assert made.match(space, B) == pinned


@pytest.mark.parametrize("hook", ["admit", "inserted", "touched", "removed", "exposed"])
def test_a_hook_that_raises_interrupts_nothing_and_is_reported_at_the_next_choice(hook: str) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no")

    made, space = directory(type("Broken", (Mru,), {}), host=9)
    entries = fill(made, space, A)
    setattr(made._books[HOST].policy._policy, hook, broken)  # type: ignore[attr-defined]
    made.forget(fill(made, space, B), HOST)
    made.touch(entries)
    made.audit()
    with pytest.raises(PolicyError, match=r"RuntimeError\('no'\)"):
        made.evict(HOST, 1)
    made.audit()
