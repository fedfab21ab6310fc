"""Pages as paths: from keys and entries to runs of neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvhoist.control.entry import Entry


def runs(start: int, stop: int, wanted: Callable[[int], bool]) -> list[tuple[int, int]]:
    """Return the maximal runs (first, last + 1) of start..stop whose members are all wanted."""
    found: list[tuple[int, int]] = []
    for i in range(start, stop):
        if wanted(i):
            if found and found[-1][1] == i:
                found[-1] = (found[-1][0], i + 1)
            else:
                found.append((i, i + 1))
    return found


def path(entry: Entry) -> list[bytes]:
    """Return the keys from the first page of the entry's chain to its own."""
    keys: list[bytes] = []
    node: Entry | None = entry
    while node is not None:
        keys.append(node.key)
        node = node.parent
    return keys[::-1]


def branches(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Cut entries, children before parents, into runs in which each is the parent of the one before."""
    found: list[list[Entry]] = []
    for entry in entries:
        if found and found[-1][-1].parent is entry:
            found[-1].append(entry)
        else:
            found.append([entry])
    return found
