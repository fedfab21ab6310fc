"""The directory does what a naive model does: every act, both tiers, hints, forks, failures, pins, all policies."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from directory_model import Copy, Model, Name, Path, key_of, keys_of, namespace, prefixes
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvhoist.control.directory import Directory, Entry
from kvhoist.control.tiers import Tier

PAGE_TIERS = (Tier.DEVICE, Tier.HOST)
NUM_SPACES = 2
paths = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=7).map(tuple)
spaces = st.integers(0, NUM_SPACES - 1)
page_tiers = st.sampled_from(PAGE_TIERS)


class Pair:
    """A directory and its model, driven together; each act compares what both answer."""

    def __init__(self, eviction: str, device: int = 5, host: int = 9, hints: int = 6) -> None:
        capacities = {Tier.DEVICE: device, Tier.HOST: host, Tier.STORAGE: hints}
        self.real = Directory(capacities, eviction=eviction, history_pages=50)
        self.model = Model(capacities, eviction)
        self.spaces = [self.real.space(namespace(number)) for number in range(NUM_SPACES)]
        self.filling: list[tuple[Tier, list[Entry], list[tuple[Name, Copy]]]] = []
        self.pinned: list[tuple[Tier, list[Entry], list[tuple[Name, Copy]]]] = []
        self.held: dict[Tier, dict[Name, bool]] = {tier: {} for tier in Tier}
        self.real.subscribe(self._hear)

    def _hear(self, event: Any) -> None:
        """Keep what events say is in DEVICE and HOST."""
        space = next(i for i, one in enumerate(self.spaces) if one.namespace.digest == event.namespace)
        for key in event.keys:
            if event.kind == "stored":
                self.held[event.tier][(space, key)] = True
            else:
                del self.held[event.tier][(space, key)]

    def names(self, entries: list[Entry]) -> list[tuple[int, bytes]]:
        return [(self.spaces.index(entry.space), entry.key) for entry in entries]

    def reserve(self, space: int, path: Path, start: int, tier: Tier) -> None:
        start = min(start, len(path))
        num_wanted = sum((space, prefix) not in self.model.copies[tier] for prefix in list(prefixes(path))[start:])
        got, evicted = self.model.reserve(space, path, start, tier)
        before = self.real.stats().tiers[str(tier)]
        entries = self.real.reserve(self.spaces[space], keys_of(path), start, len(path), tier, for_whom="someone")
        assert self.names(entries) == [(name[0], key_of(name[1])) for name in got]
        after = self.real.stats().tiers[str(tier)]
        assert after.evicted_pages - before.evicted_pages == len(evicted)
        assert after.no_room_pages - before.no_room_pages == num_wanted - len(got)
        assert all(entry.is_filling(tier) and entry.page(tier) is not None for entry in entries)
        if entries:
            self.filling.append((tier, entries, [(name, self.model.copies[tier][name]) for name in got]))

    def finish(self, index: int, failed: set[int]) -> None:
        tier, entries, copies = self.filling.pop(index % len(self.filling))
        failed = {i % len(entries) for i in failed}
        good = [i for i in range(len(entries)) if i not in failed]
        alive = {i: self.model.copies[tier].get(copies[i][0]) is copies[i][1] for i in range(len(entries))}
        for i in range(len(entries)):
            if not alive[i]:
                self.model.doomed[tier] = [copy for copy in self.model.doomed[tier] if copy is not copies[i][1]]
        self.model.publish([copies[i][0] for i in good if alive[i]], tier)
        published = self.real.publish([entries[i] for i in good], tier)
        assert published == [entries[i] for i in good if alive[i]]
        self.model.drop([copies[i][0] for i in failed if alive[i]], tier)
        self.real.fail([entries[i] for i in sorted(failed)], tier, "torn")

    def pin(self, space: int, path: Path, first: int, tier: Tier) -> None:
        matched = self.real.match(self.spaces[space], keys_of(path))
        assert len(matched) == self.model.match(space, path)
        ready = [entry for entry in matched[first:] if entry.is_ready(tier)]
        if not ready:
            return
        by_key = {key_of(prefix): (space, prefix) for prefix in prefixes(path)}
        copies = [(by_key[entry.key], self.model.copies[tier][by_key[entry.key]]) for entry in ready]
        for _, copy in copies:
            copy.pins += 1
        self.real.pin(ready, tier)
        self.pinned.append((tier, ready, copies))

    def unpin(self, index: int) -> None:
        tier, entries, copies = self.pinned.pop(index % len(self.pinned))
        for _, copy in copies:
            copy.pins -= 1
        self.model.doomed[tier] = [copy for copy in self.model.doomed[tier] if copy.pins or not copy.ready]
        self.real.unpin(entries, tier)

    def touch(self, space: int, path: Path) -> None:
        matched = self.real.match(self.spaces[space], keys_of(path))
        self.model.touch([(space, prefix) for prefix in prefixes(path)[: len(matched)]])
        self.real.touch(matched)

    def evict(self, tier: Tier, num_pages: int) -> None:
        shown = [entry.key for entry in self.real.victims(tier, num_pages)]
        victims = self.model.evict(tier, num_pages)
        evicted = self.real.evict(tier, num_pages)
        assert [key for key, _ in evicted] == [key_of(path) for _, path in victims]
        assert shown == [key for key, _ in evicted]

    def store(self, space: int, path: Path, start: int, stored: bool) -> None:
        start = min(start, len(path))
        chain = [(space, prefix) for prefix in prefixes(path)]
        keys = keys_of(path)
        if stored:
            got, _ = self.model.reserve(space, path, start, Tier.STORAGE)
            self.model.publish(got, Tier.STORAGE)
            assert self.real.set_stored(self.spaces[space], keys, True, start=start) == len(got)
        else:
            gone = [name for name in chain[start:] if name in self.model.copies[Tier.STORAGE]]
            self.model.drop(gone, Tier.STORAGE)
            assert self.real.set_stored(self.spaces[space], keys[start:], False, "quarantined") == len(gone)

    def forget(self, space: int, path: Path, tier: Tier) -> None:
        leaves = self.model.leaves(tier)
        name = (space, path)
        if name not in leaves:
            return
        self.model.simulate_removal(tier, name)
        entry = self.real.find(self.spaces[space], key_of(path))
        assert entry is not None
        self.real.forget([entry], tier)

    def clear(self, space: int | None) -> None:
        wanted = range(NUM_SPACES) if space is None else [space]
        assert self.real.clear(None if space is None else self.spaces[space]) == self.model.clear(wanted)

    def compare(self) -> None:
        self.real.audit()
        model, stats = self.model, self.real.stats()
        living: set[Name] = set()
        for tier, held in model.copies.items():
            assert stats.tiers[str(tier)].free_pages == model.free(tier)
            living |= {(space, path[: i + 1]) for space, path in held for i in range(len(path))}
            if tier is not Tier.STORAGE:
                ready = {(space, key_of(path)) for (space, path), copy in held.items() if copy.ready}
                assert self.held[tier].keys() == ready
        assert sum(space.num_entries for space in self.spaces) == len(living)
        for space, path in living:
            entry = self.real.find(self.spaces[space], key_of(path))
            assert entry is not None
            for tier, held in model.copies.items():
                copy = held.get((space, path))
                assert entry.is_ready(tier) == (copy is not None and copy.ready)
                assert entry.is_filling(tier) == (copy is not None and not copy.ready)

    def end(self) -> None:
        while self.filling:
            self.finish(0, {1})
        while self.pinned:
            self.unpin(0)
        self.compare()
        self.real.clear()
        self.real.audit()
        stats = self.real.stats()
        assert stats.entries == 0
        assert all(tier.free_pages == tier.capacity_pages for tier in stats.tiers.values())


class DirectoryMachine(RuleBasedStateMachine):
    eviction = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(self.eviction)

    @rule(space=spaces, path=paths, start=st.integers(0, 6), tier=page_tiers)
    def reserve(self, space: int, path: Path, start: int, tier: Tier) -> None:
        self.pair.reserve(space, path, start, tier)

    @precondition(lambda self: self.pair.filling)
    @rule(index=st.integers(0, 9), failed=st.sets(st.integers(0, 6), max_size=2))
    def finish(self, index: int, failed: set[int]) -> None:
        self.pair.finish(index, failed)

    @rule(space=spaces, path=paths, first=st.integers(0, 4), tier=page_tiers)
    def pin(self, space: int, path: Path, first: int, tier: Tier) -> None:
        self.pair.pin(space, path, first, tier)

    @precondition(lambda self: self.pair.pinned)
    @rule(index=st.integers(0, 9))
    def unpin(self, index: int) -> None:
        self.pair.unpin(index)

    @rule(space=spaces, path=paths)
    def touch(self, space: int, path: Path) -> None:
        self.pair.touch(space, path)

    @rule(tier=page_tiers, num_pages=st.integers(0, 6))
    def evict(self, tier: Tier, num_pages: int) -> None:
        self.pair.evict(tier, num_pages)

    @rule(space=spaces, path=paths, start=st.integers(0, 6), stored=st.booleans())
    def store(self, space: int, path: Path, start: int, stored: bool) -> None:
        self.pair.store(space, path, start, stored)

    @rule(space=spaces, path=paths, tier=page_tiers)
    def forget(self, space: int, path: Path, tier: Tier) -> None:
        self.pair.forget(space, path, tier)

    @rule(space=st.one_of(spaces, st.none()))
    def clear(self, space: int | None) -> None:
        self.pair.clear(space)

    @invariant()
    def agrees(self) -> None:
        self.pair.compare()

    def teardown(self) -> None:
        self.pair.end()


@pytest.mark.parametrize("eviction", ["lru", "lfu", "slru", "arc"])
def test_directory_agrees_with_the_naive_model(eviction: str) -> None:
    machine = type("Machine", (DirectoryMachine,), {"eviction": eviction})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def random_steps(pair: Pair, rng: random.Random, num_steps: int) -> None:
    """Acts in the proportions of a busy cache: mostly turns of conversations, some failures, few clears."""

    def path(longest: int = 8) -> Path:
        return tuple(rng.choice([0, 0, 0, 0, 1, 2]) for _ in range(rng.randint(1, longest)))

    for _ in range(num_steps):
        tier, space = rng.choice(PAGE_TIERS), rng.randrange(NUM_SPACES)
        act = rng.random()
        if act < 0.35:
            pair.reserve(space, path(), rng.choice([0, 0, 1, 3]), tier)
        elif act < 0.6 and pair.filling:
            pair.finish(rng.randrange(99), set(rng.choices(range(8), k=rng.choice([0, 0, 0, 1, 3]))))
        elif act < 0.68:
            pair.pin(space, path(), rng.choice([0, 0, 2]), tier)
        elif act < 0.76 and pair.pinned:
            pair.unpin(rng.randrange(99))
        elif act < 0.88:
            pair.touch(space, path())
        elif act < 0.93:
            pair.evict(tier, rng.randint(0, 5))
        elif act < 0.97:
            pair.store(space, path(), rng.choice([0, 2]), rng.random() < 0.6)
        elif act < 0.99:
            pair.forget(space, path(), tier)
        else:
            pair.clear(rng.choice([None, 0, 1]))


@pytest.mark.parametrize("eviction", ["lru", "lfu", "slru", "arc"])
def test_eviction_order_is_that_of_brute_force_over_long_random_runs(eviction: str) -> None:
    deadline = time.monotonic() + (15 if eviction == "lru" else 4)
    seed = 0
    while seed < 3000 and time.monotonic() < deadline:
        rng = random.Random(seed)
        pair = Pair(eviction, device=rng.randint(1, 8), host=rng.randint(1, 16), hints=rng.randint(1, 8))
        random_steps(pair, rng, 60)
        pair.compare()
        pair.end()
        seed += 1
    assert seed > 20
