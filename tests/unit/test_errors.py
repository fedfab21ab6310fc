from __future__ import annotations

import inspect
import pickle
import re

import pytest

from kvhoist import errors
from kvhoist.errors import ConfigError, HostMemoryError, KvhoistError, MissingDependencyError

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, KvhoistError)]


def test_a_message_answers_the_same_questions_in_the_same_order() -> None:
    error = KvhoistError("no such policy.", got="'fifo'", expected="a name", choices=["lru", 2], remedy="Use lru.")
    assert str(error) == "no such policy; got 'fifo'; expected a name; valid choices: lru, 2. Use lru."


def test_falsy_values_are_still_told() -> None:
    assert str(KvhoistError("wrong", got=0, expected=False)) == "wrong; got 0; expected False"


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_survive_a_trip_to_another_process(cls: type[KvhoistError]) -> None:
    error = cls("it failed", got=1, remedy="Do better.")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error)


def test_callers_can_catch_builtin_kinds() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(HostMemoryError, MemoryError)
    assert issubclass(MissingDependencyError, ImportError)


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = re.findall(r"(?:[├└]──|^)\s*(\w+Error)\b", errors.__doc__ or "", re.MULTILINE)
    assert sorted(drawn) == sorted(cls.__name__ for cls in CLASSES)
