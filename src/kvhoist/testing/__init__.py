"""For the tests of who builds on kvhoist: pages with known bytes, and what every store must do. Needs pytest."""

import pytest

pytest.register_assert_rewrite("kvhoist.testing.store_suite")

from kvhoist.testing.pages import Pages  # noqa: E402

__all__ = ["Pages"]
