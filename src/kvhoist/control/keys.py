"""Chain hashes: a page's key covers its tokens and all before them, and nothing else.

    root   = SHA-256("kvhoist chain v1" ‖ page_tokens u32 ‖ len(salt) u64 ‖ salt)
    key[i] = SHA-256(key[i-1] or root ‖ tokens u32 each ‖ [len(extra) u64 ‖ extra])        (integers little-endian)

A message without an extra has one length for a given `page_tokens`, and any with one is longer, so no tokens can pass
for an extra. The salt is part of the first page, hence of every page. Model, weights and dtype are the namespace's.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvhoist.errors import ConfigError, TokenError

Tokens = Any
"""A list or tuple of ints, a one-dimensional integer array, or whatever has `__array__` (a torch CPU tensor)."""

_ROOT = b"kvhoist chain v1"
_TOKEN_BYTES = 4
_MAX_PAGE_TOKENS = 1 << 20
_NUM_IDS = 1 << 32
_CHUNK_BYTES = 1 << 15
_MOST_ELEMENTS = 500
"""Of an array, what numpy works on without giving up the GIL. An engine's thread that gave it up waits behind busy I/O
threads to get it back, milliseconds each time."""


def chain_hashes(
    tokens: Tokens,
    page_tokens: int,
    *,
    extras: Mapping[int, bytes] | None = None,
    salt: bytes = b"",
    vocab_size: int | None = None,
) -> list[bytes]:
    """Return the 32-byte key of each whole page of `tokens`; the remainder of a page has none.

    `extras` gives page index → bytes that also determine the page (hashes of its images); an empty extra differs from
    none, and those of pages that are not whole are ignored. Raises TokenError, with the index, for an id that is no
    int, negative, not below 2^32, or not below `vocab_size`; ConfigError for other arguments that cannot be.
    """
    checked = _check_extras(extras)
    parent = chain_root(page_tokens, salt)
    return _extend(parent, pack_tokens(tokens, vocab_size=vocab_size), page_tokens, 0, checked)


def chain_root(page_tokens: int, salt: bytes = b"") -> bytes:
    """Return the parent of a chain's first page."""
    if not isinstance(page_tokens, int) or isinstance(page_tokens, bool) or not 0 < page_tokens <= _MAX_PAGE_TOKENS:
        raise ConfigError(
            "page_tokens is out of range", got=repr(page_tokens), expected=f"an int from 1 to {_MAX_PAGE_TOKENS}"
        )
    _check_bytes("salt", salt)
    return sha256(_ROOT + page_tokens.to_bytes(4, "little") + _prefixed(salt)).digest()


def pack_tokens(tokens: Tokens, *, vocab_size: int | None = None) -> NDArray[np.uint32]:
    """Return token ids as little-endian uint32, possibly sharing the memory of `tokens`. Raises TokenError."""
    packed = _from_ids(tokens) if getattr(tokens, "__array__", None) is None else _from_array(tokens)
    if vocab_size is not None:
        _check_vocabulary(packed, vocab_size)
    return packed


class TokenChain:
    """The chain of one conversation: a next turn hashes only its new pages.

    What an earlier call hashed is used as far as tokens and extras are the same, which is compared, not trusted. Holds
    4 bytes a token and a key a page. Not thread-safe. Arguments and errors as for `chain_hashes`; a call that raises
    changes nothing.
    """

    def __init__(self, page_tokens: int, salt: bytes = b"", vocab_size: int | None = None) -> None:
        self._root = chain_root(page_tokens, salt)
        self._vocab_size = vocab_size
        self._tokens: NDArray[np.uint32] = np.empty(0, np.uint32)
        self._extras: dict[int, bytes] = {}
        self._keys: list[bytes] = []
        self.page_tokens = page_tokens
        self.num_hashed_pages = 0

    def salted_with(self, salt: bytes) -> bool:
        """Tell whether `salt` is this chain's."""
        return chain_root(self.page_tokens, salt) == self._root

    def keys(self, tokens: Tokens, extras: Mapping[int, bytes] | None = None) -> list[bytes]:
        """Return what `chain_hashes` returns for the same arguments."""
        checked = _check_extras(extras)
        packed = pack_tokens(tokens, vocab_size=self._vocab_size)
        num_pages = len(packed) // self.page_tokens
        num_known = self._num_known_pages(packed, num_pages, checked)
        if num_known == num_pages:
            return self._keys[:num_pages]
        parent = self._keys[num_known - 1] if num_known else self._root
        new = _extend(parent, packed, self.page_tokens, num_known, checked)
        self._keys = self._keys[:num_known] + new
        self._tokens = np.frombuffer(packed[: num_pages * self.page_tokens].tobytes(), dtype="<u4")
        self._extras = {page: extra for page, extra in checked.items() if page < num_pages}
        self.num_hashed_pages += len(new)
        return list(self._keys)

    def _num_known_pages(self, packed: NDArray[np.uint32], num_pages: int, extras: Mapping[int, bytes]) -> int:
        num_known = min(num_pages, len(self._keys))
        num_tokens = num_known * self.page_tokens
        num_known = _num_equal(self._tokens[:num_tokens], packed[:num_tokens]) // self.page_tokens
        changed = (page for page in self._extras.keys() | extras.keys() if self._extras.get(page) != extras.get(page))
        return min([num_known, *changed])


def _num_equal(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> int:
    """Return how many leading tokens are the same in two arrays of one length."""
    for (first, ours), (_, theirs) in zip(_pieces(a), _pieces(b), strict=True):
        if ours.tobytes() != theirs.tobytes():
            return first + int(np.argmax(ours != theirs))
    return len(a)


def _extend(
    parent: bytes, packed: NDArray[np.uint32], page_tokens: int, first_page: int, extras: Mapping[int, bytes]
) -> list[bytes]:
    """Return the keys of the whole pages from `first_page` on, whose predecessor's key is `parent`."""
    page_bytes = page_tokens * _TOKEN_BYTES
    num_pages = len(packed) // page_tokens
    keys: list[bytes] = []
    append = keys.append
    # By chunks, whose copies stay in the allocator's and the processor's caches: one large copy costs page faults.
    pages_a_chunk = max(1, _CHUNK_BYTES // page_bytes)
    for first in range(first_page, num_pages, pages_a_chunk):
        last = min(first + pages_a_chunk, num_pages)
        raw = packed[first * page_tokens : last * page_tokens].tobytes()
        if not extras:
            for start in range(0, len(raw), page_bytes):
                parent = sha256(parent + raw[start : start + page_bytes]).digest()
                append(parent)
            continue
        for page in range(first, last):
            start = (page - first) * page_bytes
            extra = extras.get(page)
            tail = b"" if extra is None else _prefixed(extra)
            parent = sha256(parent + raw[start : start + page_bytes] + tail).digest()
            append(parent)
    return keys


def _from_ids(tokens: Tokens) -> NDArray[np.uint32]:
    if isinstance(tokens, str | bytes | bytearray | memoryview):
        raise TokenError("token ids cannot be read from text or bytes", got=type(tokens).__name__, expected="ints")
    try:
        packed = np.frombuffer(array("I", tokens), dtype=np.uint32)
    except (TypeError, OverflowError, ValueError) as error:
        raise _first_fault(tokens, error) from None
    # True and False pass for 1 and 0 above; only ids that small can be one.
    for first, piece in _pieces(packed):
        small = piece < 2
        if b"\1" not in small.tobytes():
            continue
        for index in (first + np.flatnonzero(small)).tolist():
            if isinstance(tokens[index], bool):
                raise _token_error(index, tokens[index], "an int")
    return packed.astype("<u4", copy=False)


def _from_array(tokens: Tokens) -> NDArray[np.uint32]:
    try:
        ids = np.asarray(tokens)
    except (TypeError, RuntimeError, ValueError) as error:
        raise TokenError(
            "token ids cannot be read from this array", got=str(error), expected="an array in host memory"
        ) from error
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise TokenError(
            "token ids are not a one-dimensional integer array", got=f"shape {ids.shape}, dtype {ids.dtype}"
        )
    if ids.dtype == np.dtype("<u4"):
        return ids
    packed = np.empty(len(ids), dtype="<u4")
    for first, piece in _pieces(ids):
        if not 0 <= int(piece.min()) <= int(piece.max()) < _NUM_IDS:
            index = first + int(np.argmax((piece < 0) | (piece >= _NUM_IDS)))
            raise _token_error(index, int(ids[index]), "an id from 0 to 2^32 - 1")
        packed[first : first + len(piece)] = piece
    return packed


def _pieces(ids: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    for first in range(0, len(ids), _MOST_ELEMENTS):
        yield first, ids[first : first + _MOST_ELEMENTS]


def _check_vocabulary(packed: NDArray[np.uint32], vocab_size: int) -> None:
    for first, piece in _pieces(packed):
        if int(piece.max()) >= vocab_size:
            index = first + int(np.argmax(piece >= vocab_size))
            raise _token_error(index, int(packed[index]), f"an id below the vocabulary's {vocab_size}")


def _first_fault(tokens: Iterable[object], error: Exception) -> TokenError:
    for index, token in enumerate(tokens):
        if not isinstance(token, int | np.integer) or isinstance(token, bool):
            return _token_error(index, token, "an int")
        if not 0 <= token < _NUM_IDS:
            return _token_error(index, token, "an id from 0 to 2^32 - 1")
    return TokenError("token ids cannot be read", got=str(error), expected="a sequence of ints")


def _token_error(index: int, token: object, expected: str) -> TokenError:
    return TokenError(f"token {index} cannot be part of a key", got=repr(token), expected=expected)


def _check_extras(extras: Mapping[int, bytes] | None) -> Mapping[int, bytes]:
    for page, extra in (extras or {}).items():
        if not isinstance(page, int) or isinstance(page, bool) or page < 0:
            raise ConfigError("extras are given by page index", got=repr(page), expected="an int from 0 on")
        _check_bytes(f"extra of page {page}", extra)
    return extras or {}


def _check_bytes(name: str, value: object) -> None:
    if not isinstance(value, bytes):
        raise ConfigError(f"the {name} is not bytes", got=type(value).__name__, expected="bytes")


def _prefixed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data
