"""Byte counts as people write them: `"64GiB"` in, `"64.0 GiB"` out."""

from __future__ import annotations

import re

from kvhoist.errors import ConfigError

_FACTORS = {
    "": 1, "b": 1,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_PATTERN = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")
_MAX_BYTES = 1 << 60


def parse_bytes(value: int | str, *, name: str) -> int:
    """Return `value` as a positive number of bytes.

    Accepts an int (bytes) or text such as `"512MiB"`, `"64 GiB"`, `"1.5TB"` (KiB is 1024, KB is 1000).
    `name` is the option's name, for the message. Raises ConfigError for zero, negative, absurd or unreadable values.
    """
    num_bytes = _read(value)
    if num_bytes is None or not 0 < num_bytes <= _MAX_BYTES:
        raise ConfigError(
            f"{name} is not a usable number of bytes",
            got=repr(value),
            expected="a positive int, or text such as '64GiB', '512MiB', '1.5TB'",
            remedy="Give a size between 1 byte and 1 EiB.",
        )
    return num_bytes


def _read(value: int | str) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    found = _PATTERN.match(value) if isinstance(value, str) else None
    factor = _FACTORS.get(found[2].lower()) if found else None
    # A number too large for a float is beyond any limit, too.
    return int(min(float(found[1]) * factor, 2.0 * _MAX_BYTES)) if found and factor else None


def format_bytes(num_bytes: int) -> str:
    """Return `num_bytes` for a person: `'1.5 GiB'`."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
