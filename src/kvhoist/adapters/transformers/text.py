"""Token ids to text while they come: a piece is given out when no later token can change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what tokenizers give for the first bytes of a character


class TextStream:
    """Turns tokens into pieces of text that join to the decoded whole. Looks back only to the last piece's tokens,
    which give the spaces between words their place: a long text costs no more a token than a short one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0  # first token of the last piece
        self._given = 0  # tokens whose text has been given out

    def push(self, token: int) -> str:
        """Take one more token and return the text that is now certain, perhaps none."""
        self._tokens.append(token)
        before, text = self._decode(self._tokens[self._start : self._given]), self._decode(self._tokens[self._start :])
        if text.endswith(_UNFINISHED) or len(text) <= len(before):
            return ""
        self._start, self._given = self._given, len(self._tokens)
        return text[len(before) :]

    def finish(self) -> str:
        """Return what was held back, decoded as it stands."""
        before, text = self._decode(self._tokens[self._start : self._given]), self._decode(self._tokens[self._start :])
        self._start = self._given = len(self._tokens)
        return text[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)) if tokens else ""
