"""Every engine on the simulated HIP runtime: every layout, component kind and page count, every byte compared."""

from __future__ import annotations

from typing import Any

import pytest
from device_rank import ENGINES, Shape, move_around_capacity, ring_of, shapes
from hip_rank import HipRank

BY_NAME = {shape.name: shape for shape in shapes()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ["page_first_direct", "page_first"])
@pytest.mark.parametrize("shape", BY_NAME.values(), ids=BY_NAME)
def test_what_is_copied_is_what_the_oracle_copies_and_nothing_else_changes(
    hip: Any, shape: Shape, order: str, engine: str
) -> None:
    """The ring passes two pages at once and holds six."""
    options = {"order": order, "staging_bytes": ring_of(shape), "io_backend": engine, "shared": order == "page_first"}
    with HipRank(shape, num_blocks=64, host_pages=16, **options) as rank:
        move_around_capacity(rank, (1, 2, 3, 5, 6, 7, 13))
