"""Memory that its process's children neither share nor copy."""

from __future__ import annotations

import pytest
from forks import status_in_fork

from kvhoist.private_memory import private_memory


def test_a_forked_child_has_zeros_and_changes_nothing_of_its_parents() -> None:
    memory = private_memory(5000)
    assert memory[:] == bytes(5000)
    memory[:] = b"p" * 5000

    def look_and_write() -> int:
        wiped = memory[:] == bytes(5000)
        memory[:] = b"c" * 5000
        return int(wiped)

    assert status_in_fork(look_and_write) == 1
    assert memory[:] == b"p" * 5000


def test_more_than_there_is_raises() -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        private_memory(1 << 60)
