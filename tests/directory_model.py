"""A naive model of the directory: dicts, lists and brute force, nothing shared with the real one but its words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from kvhoist.control.namespace import Namespace
from kvhoist.control.tiers import Tier

Path = tuple[int, ...]
"""The branches taken from the root to a page; its length is the page's depth."""
Name = tuple[int, Path]
"""A page: the number of its space, its path."""


def namespace(number: int) -> Namespace:
    return Namespace((("model_id", "m"), ("tenant", str(number))))


def key_of(path: Path) -> bytes:
    """The chain hash of a path, alike in all spaces."""
    return sha256(repr(path).encode()).digest()


def keys_of(path: Path) -> list[bytes]:
    return [key_of(path[: i + 1]) for i in range(len(path))]


def prefixes(path: Path) -> list[Path]:
    return [path[: i + 1] for i in range(len(path))]


@dataclass
class Copy:
    ready: bool = False
    pins: int = 0


class NaivePolicy:
    """Orders names; `leaf` tells which may go. Hooks get names of a path, first page first."""

    def __init__(self, num_pages: int, stamp_of: Callable[[Name], int]) -> None:
        self.num_pages = num_pages
        self.stamp_of = stamp_of

    def admit(self, names: Sequence[Name]) -> None: ...
    def inserted(self, names: Sequence[Name]) -> None: ...
    def touched(self, names: Sequence[Name]) -> None: ...
    def removed(self, names: Sequence[Name]) -> None: ...

    def victim(self, leaves: set[Name]) -> Name:
        raise NotImplementedError


class NaiveLru(NaivePolicy):
    def victim(self, leaves: set[Name]) -> Name:
        return min(leaves, key=lambda name: (self.stamp_of(name), -len(name[1])))


class NaiveLfu(NaivePolicy):
    def __init__(self, num_pages: int, stamp_of: Callable[[Name], int]) -> None:
        super().__init__(num_pages, stamp_of)
        self.uses: Counter[Name] = Counter()

    def inserted(self, names: Sequence[Name]) -> None:
        self.uses.update(names)

    def touched(self, names: Sequence[Name]) -> None:
        self.uses.update(name for name in names if name in self.uses)

    def removed(self, names: Sequence[Name]) -> None:
        for name in names:
            del self.uses[name]

    def victim(self, leaves: set[Name]) -> Name:
        return min(leaves, key=lambda name: (self.uses[name], self.stamp_of(name), -len(name[1])))


class NaiveSlru(NaivePolicy):
    def __init__(self, num_pages: int, stamp_of: Callable[[Name], int]) -> None:
        super().__init__(num_pages, stamp_of)
        self.probation: list[Name] = []
        self.protected: list[Name] = []

    def inserted(self, names: Sequence[Name]) -> None:
        self.probation += reversed(names)

    def touched(self, names: Sequence[Name]) -> None:
        for name in reversed(names):
            for segment in (self.probation, self.protected):
                if name in segment:
                    segment.remove(name)
                    self.protected.append(name)
                    break
        while len(self.protected) > int(0.8 * self.num_pages):
            self.probation.append(self.protected.pop(0))

    def removed(self, names: Sequence[Name]) -> None:
        self.probation = [name for name in self.probation if name not in names]
        self.protected = [name for name in self.protected if name not in names]

    def victim(self, leaves: set[Name]) -> Name:
        return next(name for name in self.probation + self.protected if name in leaves)


class NaiveArc(NaivePolicy):
    def __init__(self, num_pages: int, stamp_of: Callable[[Name], int]) -> None:
        super().__init__(num_pages, stamp_of)
        self.t1: list[Name] = []
        self.t2: list[Name] = []
        self.b1: list[Name] = []
        self.b2: list[Name] = []
        self.returning: list[Name] = []
        self.target = 0.0

    def admit(self, names: Sequence[Name]) -> None:
        for name in names:
            if name in self.b1:
                self.target = min(self.num_pages, self.target + max(1, len(self.b2) / len(self.b1)))
                self.b1.remove(name)
            elif name in self.b2:
                self.target = max(0, self.target - max(1, len(self.b1) / len(self.b2)))
                self.b2.remove(name)
            else:
                continue
            self.returning = [*[other for other in self.returning if other != name], name]
        self.returning = self.returning[-self.num_pages :]

    def inserted(self, names: Sequence[Name]) -> None:
        for name in reversed(names):
            (self.t2 if name in self.returning else self.t1).append(name)
        self.returning = [name for name in self.returning if name not in names]
        self._trim()

    def touched(self, names: Sequence[Name]) -> None:
        for name in reversed(names):
            for segment in (self.t1, self.t2):
                if name in segment:
                    segment.remove(name)
                    self.t2.append(name)
                    break

    def removed(self, names: Sequence[Name]) -> None:
        for name in names:
            for segment, ghosts in ((self.t1, self.b1), (self.t2, self.b2)):
                if name in segment:
                    segment.remove(name)
                    ghosts.append(name)
        self._trim()

    def victim(self, leaves: set[Name]) -> Name:
        order = self.t1 + self.t2 if len(self.t1) > self.target else self.t2 + self.t1
        return next(name for name in order if name in leaves)

    def _trim(self) -> None:
        while self.b1 and len(self.t1) + len(self.b1) > self.num_pages:
            self.b1.pop(0)
        while self.b2 and len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) > 2 * self.num_pages:
            self.b2.pop(0)


NAIVE = {"lru": NaiveLru, "lfu": NaiveLfu, "slru": NaiveSlru, "arc": NaiveArc}


@dataclass
class Model:
    """`copies[tier][name]`: what a tier holds; doomed copies are kept apart, by a number of their own."""

    capacities: dict[Tier, int]
    eviction: str
    copies: dict[Tier, dict[Name, Copy]] = field(default_factory=lambda: {tier: {} for tier in Tier})
    doomed: dict[Tier, list[Copy]] = field(default_factory=lambda: {tier: [] for tier in Tier})
    stamps: dict[Name, int] = field(default_factory=dict)
    now: int = 0

    def __post_init__(self) -> None:
        self.policies = {
            tier: (NaiveLru if tier is Tier.STORAGE else NAIVE[self.eviction])(num_pages, self.stamps.__getitem__)
            for tier, num_pages in self.capacities.items()
        }

    def free(self, tier: Tier) -> int:
        return self.capacities[tier] - len(self.copies[tier]) - len(self.doomed[tier])

    def lives(self, name: Name) -> bool:
        """Does the page have an entry: a copy of it, or of a descendant?"""
        return any(
            space == name[0] and path[: len(name[1])] == name[1]
            for copies in self.copies.values()
            for space, path in copies
        )

    def match(self, space: int, path: Path) -> int:
        num_pages = 0
        for prefix in prefixes(path):
            if not any((copy := held.get((space, prefix))) and copy.ready for held in self.copies.values()):
                break
            num_pages += 1
        return num_pages

    def leaves(self, tier: Tier, kept: Iterable[Name] = ()) -> set[Name]:
        held, kept = self.copies[tier], set(kept)
        above = {(space, path[:i]) for space, path in held for i in range(len(path))}
        return {n for n, copy in held.items() if copy.ready and not copy.pins and n not in above and n not in kept}

    def touch(self, names: Sequence[Name]) -> None:
        self.now += 1
        self.stamps.update(dict.fromkeys(names, self.now))
        for policy in self.policies.values():
            policy.touched(names)

    def evict(self, tier: Tier, num_pages: int, kept: Iterable[Name] = ()) -> list[Name]:
        """Evict one after the other. `kept`: the reserved chain, of which the deepest copy and all above it stay."""
        policy = self.policies[tier]
        victims: list[Name] = []
        while len(victims) < num_pages and (leaves := self.leaves(tier, kept)):
            victim = policy.victim(leaves)
            victims.append(victim)
            self.simulate_removal(tier, victim)
        return victims

    def simulate_removal(self, tier: Tier, name: Name) -> None:
        del self.copies[tier][name]
        self.policies[tier].removed([name])

    def reserve(self, space: int, path: Path, start: int, tier: Tier) -> tuple[list[Name], list[Name]]:
        """Return the pages now being filled, and those evicted for them."""
        chain = [(space, prefix) for prefix in prefixes(path)]
        wanted = [name for name in chain[start:] if name not in self.copies[tier]]
        if not wanted:
            return [], []
        self.policies[tier].admit(wanted)
        evicted = self.evict(tier, max(len(wanted) - self.free(tier), 0), chain)
        got = wanted[: self.free(tier)]
        for name in got:
            self.copies[tier][name] = Copy(pins=1)
        return got, evicted

    def publish(self, names: Sequence[Name], tier: Tier) -> None:
        self.now += 1
        for name in names:
            copy = self.copies[tier][name]
            copy.ready, copy.pins = True, copy.pins - 1
            self.stamps[name] = self.now
        self.policies[tier].inserted(names)

    def drop(self, names: Sequence[Name], tier: Tier) -> None:
        for name in names:
            del self.copies[tier][name]

    def clear(self, spaces: Iterable[int]) -> int:
        num_freed = 0
        for space in spaces:
            for tier, held in self.copies.items():
                mine = [name for name in held if name[0] == space]
                ready = [name for name in mine if held[name].ready]
                kept = [held[name] for name in mine if held[name].pins]
                num_freed += (len(mine) - len(kept)) * (tier is not Tier.STORAGE)
                self.doomed[tier] += kept
                for name in mine:
                    del held[name]
                if tier in self.policies:
                    self.policies[tier].removed(ready)
        return num_freed
