"""How vLLM's block hashes and blocks make pages of a request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvhoist.adapters.vllm.requests import PageShape, RequestState
from kvhoist.errors import ConfigError


def request(num_hashes: int, *, num_tokens: int = 0, num_computed_tokens: int = 0, first: int = 0) -> SimpleNamespace:
    hashes = [b"h%d" % (first + i) for i in range(num_hashes)]
    return SimpleNamespace(block_hashes=hashes, num_tokens=num_tokens, num_computed_tokens=num_computed_tokens)


@pytest.mark.parametrize(
    ("block_tokens", "given", "blocks", "page_tokens"),
    [(16, None, 4, 64), (32, None, 2, 64), (48, None, 2, 96), (128, None, 1, 128), (16, 1, 1, 16), (128, 3, 3, 384)],
)
def test_a_page_has_the_blocks_that_hold_64_tokens_or_those_given(
    block_tokens: int, given: int | None, blocks: int, page_tokens: int
) -> None:
    shape = PageShape.of(block_tokens, block_tokens, given)
    assert (shape.blocks_per_page, shape.page_tokens, shape.hashes_per_page) == (blocks, page_tokens, blocks)


def test_a_block_of_several_hashes_is_named_by_its_last() -> None:
    shape = PageShape.of(32, 16, 2)
    assert shape.hashes_per_page == 4
    assert RequestState(request(9)).update_keys(shape.hashes_per_page) == [b"h3", b"h7"]
    with pytest.raises(ConfigError, match="no whole number of block hashes"):
        PageShape.of(16, 12, None)


def test_keys_grow_with_the_request_and_are_not_hashed_again() -> None:
    state = RequestState(request(3))
    assert state.update_keys(2) == [b"h1"]
    state.request.block_hashes.append(b"h3")
    assert state.update_keys(2) == [b"h1", b"h3"]
    assert state.update_keys(2) == [b"h1", b"h3"]


@pytest.mark.parametrize("after", [request(4, first=10), request(1), request(0)])
def test_a_session_that_goes_on_from_other_tokens_gets_other_keys(after: SimpleNamespace) -> None:
    state = RequestState(request(4))
    state.update_keys(2)
    state.request = after
    assert state.update_keys(2) == after.block_hashes[1::2]


def test_speculative_tokens_and_tokens_not_computed_are_no_part_of_a_page() -> None:
    assert RequestState(request(0, num_tokens=31, num_computed_tokens=40)).num_computed_pages(16) == 1
    assert RequestState(request(0, num_tokens=40, num_computed_tokens=31)).num_computed_pages(16) == 1
    assert RequestState(request(0, num_tokens=32, num_computed_tokens=32)).num_computed_pages(16) == 2
