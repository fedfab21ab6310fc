"""Eviction policies: which of a tier's leaves goes first."""

from __future__ import annotations

from kvhoist.control.eviction.arc import ArcPolicy
from kvhoist.control.eviction.base import EvictionFactory, EvictionPolicy, PolicyContext
from kvhoist.control.eviction.guard import GuardedPolicy
from kvhoist.control.eviction.lfu import LfuPolicy
from kvhoist.control.eviction.lru import LruPolicy
from kvhoist.control.eviction.slru import SlruPolicy
from kvhoist.errors import PolicyError

__all__ = ["POLICIES", "EvictionFactory", "EvictionPolicy", "PolicyContext", "eviction_factory"]

POLICIES: dict[str, EvictionFactory] = {"lru": LruPolicy, "slru": SlruPolicy, "lfu": LfuPolicy, "arc": ArcPolicy}


def eviction_factory(eviction: str | EvictionFactory) -> EvictionFactory:
    """Return the factory called `eviction`, or the outside factory `eviction` with a guard around what it makes.

    Raises PolicyError for an unknown name.
    """
    if callable(eviction):
        return lambda context: GuardedPolicy(eviction(context))
    factory = POLICIES.get(eviction)
    if factory is None:
        raise PolicyError(
            "no such eviction policy",
            got=repr(eviction),
            choices=POLICIES,
            remedy="Give one of these names, or a callable that takes a PolicyContext and returns an EvictionPolicy.",
        )
    return factory
