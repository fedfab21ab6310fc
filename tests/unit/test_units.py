from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhoist.errors import ConfigError
from kvhoist.units import format_bytes, parse_bytes, round_up


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [(1, 1), ("1", 1), ("64GiB", 64 << 30), (" 1.5 TB ", 1_500_000_000_000), ("3 kib", 3072), ("7kb", 7000), ("2B", 2)],
)
def test_sizes_are_read_as_people_write_them(text: int | str, num_bytes: int) -> None:
    assert parse_bytes(text, name="host_bytes") == num_bytes


@pytest.mark.parametrize(
    "value", [0, -1, True, "", "GiB", "-1GiB", "1 XB", "1e9", "0.1B", 1 << 61, "9999999TiB", 1.5, None]
)
def test_a_size_that_cannot_be_names_its_option(value: Any) -> None:
    with pytest.raises(ConfigError, match="host_bytes is not a usable number of bytes"):
        parse_bytes(value, name="host_bytes")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB"), (7 << 40, "7.0 TiB")],
)
def test_sizes_are_written_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 20))
def test_round_up_is_the_least_multiple_not_below(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple
