"""A small directory and the chains that the directory's tests use."""

from __future__ import annotations

from typing import Any

from directory_model import keys_of, namespace

from kvhoist.control.directory import Directory, Entry, Space
from kvhoist.control.tiers import Tier

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE
A = keys_of((0,) * 8)
FORK = keys_of((0, 0, 0, 1, 1, 1))
B = keys_of((5,) * 8)


def directory(host: int = 8, device: int = 8, **options: Any) -> tuple[Directory, Space]:
    made = Directory({HOST: host, DEVICE: device}, **options)
    return made, made.space(namespace(0), 0)


def fill(made: Directory, space: Space, keys: list[bytes], tier: Tier = HOST, start: int = 0) -> list[Entry]:
    return made.publish(made.reserve(space, keys, start, len(keys), tier), tier)
