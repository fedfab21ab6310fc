"""A generation as it comes: tokens and text a step, and a clean end at any point."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

from kvhoist.adapters.transformers.report import Generation
from kvhoist.adapters.transformers.run import Run
from kvhoist.adapters.transformers.text import TextStream
from kvhoist.errors import ConfigError


class Piece(NamedTuple):
    """One step of a stream: the new token, and the text that is certain with it (none without a tokenizer)."""

    token: int
    text: str


class CancelToken:
    """Ends generations from another thread, after the step in progress: pass it as `cancelled`."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        self._event.set()

    def __call__(self) -> bool:
        return self._event.is_set()


class Stream(Iterator[Piece]):
    """The pieces of one generation as they come. `close()`, or leaving the `with` block, ends it: what was computed
    stays cached and no page is lost. `result` is there once the stream has ended. For one thread at a time."""

    def __init__(self, run: Run, cancelled: Callable[[], bool], tokenizer: Any) -> None:
        self._run = run
        self._steps: Generator[list[tuple[int, int]], None, None] = run.steps(cancelled)
        self._text = TextStream(tokenizer) if tokenizer is not None else None
        self._pieces: list[str] = []
        self._ended = False
        self._turn = threading.Lock()

    def __next__(self) -> Piece:
        with self._one_thread():
            return self._next()

    def _next(self) -> Piece:
        try:
            ((_, token),) = next(self._steps)
        except BaseException:
            self._end()
            raise
        text = "" if self._text is None else self._text.push(token)
        if self._text is not None and self._run.rows[0].finish_reason is not None:
            text += self._text.finish()
        self._pieces.append(text)
        return Piece(token, text)

    def close(self) -> None:
        """End the generation. Idempotent. Raises ConfigError while another thread computes a step."""
        with self._one_thread():
            self._steps.close()
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def result(self) -> Generation:
        """Tokens, text and report. Raises ConfigError while the stream has not ended."""
        if not self._ended:
            raise ConfigError("the stream has not ended", remedy="Read it to its end, or close() it.")
        row = self._run.rows[0]
        return Generation(
            tuple(row.tokens), "".join(self._pieces), row.finish_reason or "cancelled", row.report(self._run.started_at)
        )

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            raise ConfigError(
                "another thread is computing a step of this stream",
                expected="one thread at a time",
                remedy="Pass a CancelToken as `cancelled` to end it from elsewhere.",
            )
        try:
            yield
        finally:
            self._turn.release()

    def _end(self) -> None:
        if self._text is not None and not self._ended:
            self._pieces.append(self._text.finish())
        self._ended = True
