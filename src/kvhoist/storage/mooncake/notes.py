"""What namespaces stand for, kept in the shared store: a hash table of objects, since objects cannot be listed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

from kvhoist.errors import StorageError
from kvhoist.storage.mooncake.client import Client
from kvhoist.storage.notes import parse, read_note

NUM_SLOTS = 64
_MAX_NOTE_BYTES = 64 << 10
_SLOTS = [f"kvhoist1-note/{i}" for i in range(NUM_SLOTS)]


def write_note(client: Client, namespace: bytes, fields: Mapping[str, str]) -> None:
    """Note a namespace in the first free slot from its own on. Idempotent. An object is never replaced, so two writers
    of one slot cannot spoil each other: who reads back another's note goes on. Raises StorageError where it cannot."""
    if namespace in read_notes(client):
        return
    note = json.dumps({"namespace": namespace.hex(), "fields": dict(fields)}).encode()
    if len(note) > _MAX_NOTE_BYTES:
        raise StorageError("a namespace of too many fields", got=f"{len(note)} bytes", expected=_MAX_NOTE_BYTES)
    first = int.from_bytes(namespace[:4], "little") % NUM_SLOTS
    order = [*_SLOTS[first:], *_SLOTS[:first]]
    for slot, taken in zip(order, client.held(order), strict=True):
        if not taken:
            client.codes(lambda engine, slot=slot: [engine.put(slot, note, client.replicate)])  # type: ignore[misc]
            if _read(client, slot) == note:
                return
    raise StorageError("no room to note what a namespace stands for", got=f"{NUM_SLOTS} slots, none to be had")


def read_notes(client: Client) -> dict[bytes, dict[str, str]]:
    """Return the fields of every noted namespace. What is no note is left out: anybody can write there."""
    found: dict[bytes, dict[str, str]] = {}
    for slot, taken in zip(_SLOTS, client.held(_SLOTS), strict=True):
        if taken:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                content = parse(_read(client, slot))
                if (note := read_note(content["namespace"], content["fields"])) is not None:
                    found.setdefault(*note)
    return found


def _read(client: Client, slot: str) -> bytes:
    """Return an object's bytes, none for one that is gone or too long to be a note."""
    if not 0 < client.call(lambda engine: engine.get_size(slot)) <= _MAX_NOTE_BYTES:
        return b""
    return bytes(client.call(lambda engine: engine.get(slot)))
