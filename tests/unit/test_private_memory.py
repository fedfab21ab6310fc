"""Memory that is its process's alone."""

from __future__ import annotations

import os

import pytest

from kvhoist.private_memory import private_memory


def test_a_forked_child_has_a_copy() -> None:
    memory = private_memory(5000)
    assert memory[:] == bytes(5000)
    child = os.fork()
    if not child:
        memory[:] = b"x" * 5000
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert memory[:] == bytes(5000)


def test_more_than_there_is_raises() -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        private_memory(1 << 60)
