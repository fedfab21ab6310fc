"""What a cache of this process shows and does for `kvhoist ps`, `attach` and `detach`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvhoist.binding import Binding
from kvhoist.control.namespace import Namespace


def status_of(engine: str, namespace: Namespace, num_host_pages: int, store: str) -> dict[str, Any]:
    """Return what `kvhoist ps` lists of a cache; `store` says which one it has, for people."""
    return {
        "engine": engine,
        "model": str(json.loads(namespace.field_dict()["model_id"])),
        "namespace": namespace.digest.hex()[:16],
        "host_pages": num_host_pages,
        "store": store,
    }


class ServedCache:
    """A cache in one process, whose engine called the library."""

    def __init__(self, binding: Binding, namespace: Namespace) -> None:
        self._binding = binding
        self._namespace = namespace

    def status(self) -> Mapping[str, Any]:
        return status_of("library", self._namespace, self._binding.arena.num_pages, self._binding.slot.state)

    def attach(self, address: str) -> Mapping[str, Any]:
        self._binding.attach_store(address)
        return self.status()

    def detach(self, *, drain: bool, timeout_s: float) -> Mapping[str, Any]:
        return self._binding.detach_store(drain=drain, timeout_s=timeout_s).to_dict()
