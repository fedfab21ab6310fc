"""Numbers that callers give, checked before anything changes."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from kvhoist.errors import ConfigError

_YEAR_S = 365 * 86400.0


def seconds(name: str, value: Any) -> float:
    """Return a time to wait, at most a year (what the system's clocks can count). Raises ConfigError for one that is
    negative or no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"{name} is out of range", got=repr(value), expected="seconds from 0 on")
    return float(min(value, _YEAR_S))


def count(name: str, value: Any, *, least: int = 0, most: int | None = None) -> int:
    """Return a whole number from `least` to `most`. Raises ConfigError for all else."""
    number = _index(value)
    if number is None or isinstance(value, bool) or number < least or (most is not None and number > most):
        limits = f"from {least} on" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} is out of range", got=repr(value), expected=f"an int {limits}")
    return number


def whole_numbers(values: Iterable[Any] | None) -> list[int] | None:
    """Return ids (ints, or an array's) as ints; None where they are no such thing: a float would be cut."""
    try:
        return None if values is None else [operator.index(value) for value in values]
    except TypeError:
        return None


def _index(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None
