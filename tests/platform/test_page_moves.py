"""The kernel's answers for pages of this process, from the kernel itself."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from kvhoist.platform.page_moves import NOT_TRIED, PAGE_BYTES, answer_name, move_pages, page_nodes


@pytest.fixture
def pages(pinned: np.ndarray) -> list[int]:
    start: int = pinned.ctypes.data
    return [start, start + PAGE_BYTES, start + 2 * PAGE_BYTES]


def test_pages_that_were_touched_have_a_node_and_stay_there_when_asked_to(pages: list[int], pinned: np.ndarray) -> None:
    pinned[:] = 7
    (node,) = set(page_nodes(pages))
    assert node >= 0
    assert move_pages(pages, node) == [node] * 3
    assert (pinned == 7).all()


def test_a_page_that_is_nowhere_says_so_and_the_others_keep_their_places(pages: list[int], pinned: np.ndarray) -> None:
    pinned[:] = 1
    found = page_nodes([pages[0], PAGE_BYTES, pages[2]])
    assert found[1] == -errno.EFAULT
    assert found[0] == found[2] >= 0


def test_a_node_that_is_not_there_is_refused_as_a_whole(pages: list[int], pinned: np.ndarray) -> None:
    pinned[:] = 1
    with pytest.raises(OSError, match=r"\[Errno") as caught:
        move_pages(pages, 1000)
    assert caught.value.errno in (errno.ENODEV, errno.EPERM)


@pytest.mark.parametrize(
    ("answer", "name"), [(0, "node 0"), (3, "node 3"), (-14, "EFAULT"), (-16, "EBUSY"), (NOT_TRIED, "not tried")]
)
def test_answers_have_names(answer: int, name: str) -> None:
    assert answer_name(answer) == name
