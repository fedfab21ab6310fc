from __future__ import annotations

from array import array
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvhoist.control.keys import TokenChain, chain_hashes, chain_root, pack_tokens
from kvhoist.errors import ConfigError, TokenError

ids = st.integers(0, 2**32 - 1)
token_lists = st.lists(ids, max_size=40)
page_sizes = st.integers(1, 7)
extra_maps = st.dictionaries(st.integers(0, 8), st.binary(max_size=6), max_size=3)
salts = st.binary(max_size=5)


def naive_hashes(tokens: list[int], page_tokens: int, extras: dict[int, bytes], salt: bytes) -> list[bytes]:
    """The documented formula, word for word."""
    size = page_tokens.to_bytes(4, "little")
    parent = sha256(b"kvhoist chain v1" + size + len(salt).to_bytes(8, "little") + salt).digest()
    keys = []
    for page in range(len(tokens) // page_tokens):
        message = parent
        for token in tokens[page * page_tokens : (page + 1) * page_tokens]:
            message += token.to_bytes(4, "little")
        if page in extras:
            message += len(extras[page]).to_bytes(8, "little") + extras[page]
        parent = sha256(message).digest()
        keys.append(parent)
    return keys


@given(token_lists, page_sizes, extra_maps, salts)
def test_keys_follow_the_documented_formula(
    tokens: list[int], size: int, extras: dict[int, bytes], salt: bytes
) -> None:
    assert chain_hashes(tokens, size, extras=extras, salt=salt) == naive_hashes(tokens, size, extras, salt)


def test_keys_never_change_between_versions() -> None:
    """A stored page must be found by later versions: these are for ever."""
    keys = chain_hashes(list(range(8)), 4, extras={1: b"image"}, salt=b"salt")
    assert [key.hex()[:16] for key in keys] == ["9451491b6a4d3610", "96691933e9070d49"]
    assert chain_root(64).hex()[:16] == "9d9679fde6945b39"


@given(token_lists, token_lists, page_sizes, salts)
def test_a_common_prefix_has_common_keys(head: list[int], tail: list[int], size: int, salt: bytes) -> None:
    whole = chain_hashes(head + tail, size, salt=salt)
    assert chain_hashes(head, size, salt=salt) == whole[: len(head) // size]


@given(st.lists(ids, min_size=1, max_size=40), page_sizes, st.data())
def test_one_other_token_changes_its_page_and_all_later_ones(tokens: list[int], size: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(ids.filter(lambda token: token != tokens[index]))
    before = chain_hashes(tokens, size)
    after = chain_hashes([*tokens[:index], other, *tokens[index + 1 :]], size)
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [page < index // size for page in range(len(before))]


@given(st.lists(ids, min_size=8, max_size=40), st.integers(1, 4), st.data())
def test_one_other_extra_changes_its_page_and_all_later_ones(tokens: list[int], size: int, data: st.DataObject) -> None:
    num_pages = len(tokens) // size
    page = data.draw(st.integers(0, num_pages - 1))
    choices = st.one_of(st.none(), st.binary(max_size=4))
    first, second = data.draw(st.tuples(choices, choices).filter(lambda pair: pair[0] != pair[1]))
    keys = [chain_hashes(tokens, size, extras={} if e is None else {page: e}) for e in (first, second)]
    assert [a == b for a, b in zip(*keys, strict=True)] == [p < page for p in range(num_pages)]


@given(st.lists(ids, min_size=8, max_size=20), st.integers(1, 4), salts, salts)
def test_another_salt_shares_no_page(tokens: list[int], size: int, first: bytes, second: bytes) -> None:
    shared = set(chain_hashes(tokens, size, salt=first)) & set(chain_hashes(tokens, size, salt=second))
    assert bool(shared) == (first == second)


@given(st.lists(ids, min_size=12, max_size=24))
def test_another_page_size_shares_no_page(tokens: list[int]) -> None:
    keys = [key for size in (1, 2, 3, 4, 6) for key in chain_hashes(tokens, size)]
    assert len(set(keys)) == len(keys)


def test_no_extra_can_pass_for_tokens_or_for_another_extra() -> None:
    """Every way of moving bytes between tokens, extras and salt gives another key."""
    five = (5).to_bytes(4, "little")
    variants: list[tuple[list[int], dict[int, bytes], bytes]] = [
        ([5, 5], {}, b""),
        ([5, 5], {0: b""}, b""),
        ([5, 5], {0: five}, b""),
        ([5, 5], {0: five + five}, b""),
        ([5, 5], {0: bytes(8)}, b""),
        ([5, 5], {0: bytes(16)}, b""),
        ([5, 5], {}, five),
        ([5, 5], {}, five + five),
        ([5, 5], {0: five}, five),
    ]
    keys = [chain_hashes(tokens, 2, extras=extras, salt=salt)[0] for tokens, extras, salt in variants]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda t: array("q", t),
        lambda t: np.array(t, np.int64),
        lambda t: np.array(t, np.uint16),
        lambda t: np.array(t, np.uint32),
        lambda t: np.array(t, np.int64)[::1],
        lambda t: np.repeat(np.array(t, np.int32), 2)[::2],
        lambda t: [np.int64(token) for token in t],
        lambda t: torch.tensor(t),
        lambda t: torch.tensor(t, dtype=torch.int32),
    ],
)
def test_every_way_of_giving_tokens_gives_the_same_keys(make: Any) -> None:
    tokens = list(range(100, 140))
    assert chain_hashes(make(tokens), 8) == chain_hashes(tokens, 8)


@pytest.mark.parametrize("empty", [[], (), np.array([]), np.array([], np.int64), torch.tensor([])])
def test_no_tokens_have_no_keys(empty: Any) -> None:
    assert chain_hashes(empty, 4) == []
    assert TokenChain(4).keys(empty) == []


def test_a_part_of_a_page_has_no_key() -> None:
    assert len(chain_hashes(list(range(11)), 4)) == 2


@pytest.mark.parametrize(
    ("tokens", "index"),
    [
        ([1, -1, 2], 1),
        ([1, 2, 2**32], 2),
        ([1, 2, 2**80], 2),
        ([1, 2.0], 1),
        ([1, "2"], 1),
        ([None], 0),
        ([7, True], 1),
        ([False, 7], 0),
        (np.array([3, -4]), 1),
        (np.array([3, 2**32]), 1),
        (np.array([3, 2**63], np.uint64), 1),
        (torch.tensor([3, 4, -1]), 2),
    ],
)
def test_what_is_no_token_is_named_by_its_index(tokens: Any, index: int) -> None:
    with pytest.raises(TokenError, match=f"token {index} cannot be part of a key"):
        chain_hashes(tokens, 2)


@pytest.mark.parametrize(
    "tokens", [np.array([1.0]), np.array([[1]]), np.array([True]), torch.tensor([1.5]), "12", b"12"]
)
def test_what_holds_no_tokens_is_refused(tokens: Any) -> None:
    with pytest.raises(TokenError, match="token ids"):
        chain_hashes(tokens, 1)


def test_a_token_outside_of_the_vocabulary_is_refused_where_the_vocabulary_is_known() -> None:
    assert len(chain_hashes([9, 9], 1, vocab_size=10)) == 2
    with pytest.raises(TokenError, match=r"token 1 .*got 10.*below the vocabulary's 10"):
        chain_hashes([9, 10], 1, vocab_size=10)
    with pytest.raises(TokenError, match="token 1 "):
        TokenChain(1, vocab_size=10).keys(np.array([9, 10]))


@pytest.mark.parametrize("page_tokens", [0, -1, True, 1.5, "16", 1 << 21])
def test_a_page_size_that_cannot_be_is_refused(page_tokens: Any) -> None:
    with pytest.raises(ConfigError, match="page_tokens is out of range"):
        chain_hashes([1], page_tokens)
    with pytest.raises(ConfigError, match="page_tokens is out of range"):
        TokenChain(page_tokens)


@pytest.mark.parametrize("extras", [{-1: b"x"}, {"0": b"x"}, {True: b"x"}, {0: "x"}, {0: 3}])
def test_extras_that_cannot_be_are_refused(extras: Any) -> None:
    with pytest.raises(ConfigError, match="extra"):
        chain_hashes([1], 1, extras=extras)


def test_a_salt_that_is_no_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="salt is not bytes"):
        chain_hashes([1], 1, salt="text")  # type: ignore[arg-type]


def test_packing_is_little_endian() -> None:
    assert pack_tokens([1, 258]).tobytes() == b"\x01\0\0\0\x02\x01\0\0"


@given(
    st.lists(st.integers(0, 3), max_size=30), st.lists(st.tuples(st.integers(0, 30), token_lists, extra_maps)), salts
)
def test_a_chain_equals_hashing_each_turn_alone(start: list[int], turns: Any, salt: bytes) -> None:
    """Turns cut back, diverge, grow and change their extras."""
    chain = TokenChain(3, salt)
    tokens = start
    for cut, more, extras in turns:
        tokens = tokens[:cut] + more
        assert chain.keys(tokens, extras) == chain_hashes(tokens, 3, extras=extras, salt=salt)


def test_a_next_turn_hashes_only_its_new_pages() -> None:
    chain = TokenChain(16)
    chain.keys(list(range(1600)))
    assert chain.num_hashed_pages == 100
    chain.keys(list(range(1600 + 40)))
    assert chain.num_hashed_pages == 102
    chain.keys(list(range(800)))
    chain.keys(np.arange(1640))
    assert chain.num_hashed_pages == 102
    chain.keys([*range(800), 0, *range(801, 832)])
    assert chain.num_hashed_pages == 104


def test_a_changed_extra_is_compared_not_trusted() -> None:
    chain, tokens = TokenChain(2), list(range(8))
    before = chain.keys(tokens, {2: b"cat"})
    after = chain.keys(tokens, {2: b"dog"})
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, False]
    assert chain.num_hashed_pages == 6


def test_a_chain_keeps_no_view_of_the_callers_array() -> None:
    tokens = np.arange(8, dtype=np.uint32)
    chain = TokenChain(4)
    chain.keys(tokens)
    tokens[0] = 99
    assert chain.keys(tokens) == chain_hashes(tokens, 4)


def test_a_failed_call_changes_nothing_in_a_chain() -> None:
    chain = TokenChain(2)
    keys = chain.keys([1, 2, 3, 4])
    with pytest.raises(TokenError):
        chain.keys([9, 9, 9, -1])
    assert chain.keys([1, 2, 3, 4]) == keys
    assert chain.num_hashed_pages == 2


def test_callers_cannot_change_a_chain_by_its_answer() -> None:
    chain = TokenChain(1)
    chain.keys([1, 2, 3]).clear()
    assert chain.keys([1, 2, 3]) == chain_hashes([1, 2, 3], 1)


@pytest.mark.parametrize("at", [0, 499, 500, 1999])
def test_a_bool_anywhere_in_a_long_prompt_is_found(at: int) -> None:
    tokens: list[Any] = [0, 1] * 1000
    assert len(chain_hashes(tokens, 16)) == 125
    tokens[at] = bool(tokens[at])
    with pytest.raises(TokenError, match=f"token {at} cannot be part of a key"):
        chain_hashes(tokens, 16)


@pytest.mark.parametrize("at", [0, 15, 16, 8191, 8192, 19_999])
def test_a_long_conversation_that_changed_anywhere_is_hashed_anew_from_there(at: int) -> None:
    tokens = list(range(20_000))
    chain = TokenChain(16)
    chain.keys(tokens)
    tokens[at] += 1
    assert chain.keys(tokens) == chain_hashes(tokens, 16)
    assert chain.num_hashed_pages == 1250 + 1250 - at // 16
