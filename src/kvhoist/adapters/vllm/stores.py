"""The scheduler's side of attaching and detaching stores: wishes come from other threads, orders go with steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from kvhoist.adapters.vllm.metadata import StoreAct, StoreAnswer, StoreOrder
from kvhoist.control.plane import ControlPlane
from kvhoist.errors import ClosedError, ConfigError, StorageError
from kvhoist.stats import DetachTally

_ATTACH_S = 590.0
"""How long who asks waits for all ranks to open a store."""

_POKE_S = 0.05
"""How often an idle engine is woken for a step, while a wish is under way only."""

_HINTS_A_STEP = 4096
"""Forgotten within one step, in a few ms."""


def _nobody_sleeps() -> None:
    """Wake nobody."""


@dataclass(slots=True, eq=False)
class _Wish:
    """What was asked: the first order, where it stands, and what becomes of it."""

    order: StoreOrder
    future: Future[Mapping[str, Any]] = field(default_factory=Future)
    taken: bool = False
    answers: dict[int, StoreAnswer] = field(default_factory=dict)
    tally: DetachTally | None = None


class StoreChanges:
    """One wish at a time. `attach` and `detach` are called from other threads and wait; all else is the scheduler's,
    which looks here only while `is_asked`.

    A store is opened by every rank, off its steps; the plane uses it once all have it, in the step after that which
    tells them. Where one cannot, the others give theirs up and nothing has changed. `wake` lets an idle engine take a
    step where `wants_step`; without it a wish waits for the next request.
    """

    def __init__(self, plane: ControlPlane, address: str | None) -> None:
        self.is_asked = False
        self.wants_step = False
        self._plane = plane
        self._num_ranks = plane.tracker.num_ranks
        self._attached = address
        self._detached = ""
        self.wake: Callable[[], object] = _nobody_sleeps
        self._wish: _Wish | None = None
        self._num_wishes = 0
        self._closed = False
        self._mail = threading.Lock()

    @property
    def state(self) -> str:
        """Say which store is attached, for people. From any thread."""
        attached = self._attached
        return f"no store attached{self._detached}" if attached is None else f"attached: {attached}"

    # -- other threads -------------------------------------------------------------------------------------------

    def attach(self, address: str) -> Mapping[str, Any]:
        """Raises StorageError where a store is attached, another wish is under way, or a rank cannot open it."""
        return self._ask(StoreAct.OPEN, _ATTACH_S, address=address)

    def detach(self, *, drain: bool, timeout_s: float) -> Mapping[str, Any]:
        """Raises StorageError where none is attached or another wish is under way."""
        return self._ask(StoreAct.GIVE_UP, timeout_s + 20.0, drain=drain, timeout_s=timeout_s)

    def _ask(self, act: StoreAct, limit_s: float, **options: Any) -> Mapping[str, Any]:
        deadline = time.monotonic() + limit_s
        with self._mail:
            if self._closed:
                raise ClosedError("this engine is being shut down")
            if self._wish is not None:
                raise StorageError(
                    "another attach or detach of this engine's store is under way",
                    remedy="Call again when it has ended.",
                )
            self._num_wishes += 1
            wish = self._wish = _Wish(StoreOrder(self._num_wishes, act, **options))
            self.is_asked = True
        while not wish.future.done() and time.monotonic() < deadline:
            self.wants_step = True
            self.wake()
            futures.wait([wish.future], _POKE_S)
        with self._mail:
            if not wish.future.done() and not wish.taken:
                self._wish = None
        if wish.future.done():
            return wish.future.result()
        got = f"nothing within {limit_s:.0f} s"
        if wish.taken:
            raise StorageError("not every rank has answered", got=got, remedy="It goes on; kvhoist ps tells its end.")
        remedy = "Nothing has changed: send it a request, and call again."
        raise StorageError("the engine has taken no step", got=got, remedy=remedy)

    # -- the scheduler -------------------------------------------------------------------------------------------

    def next_order(self) -> StoreOrder | None:
        """Return what the step that is being built tells the ranks, after its jobs."""
        self.wants_step = False
        with self._mail:
            wish = self._wish
            if wish is None:
                self.is_asked = False
                return None
            taken, wish.taken = wish.taken, True
        if not taken:
            return self._begin(wish)
        if wish.order.act is StoreAct.OPEN:
            return self._use(wish) if len(wish.answers) == self._num_ranks else None
        gone = not self._plane.directory.drop_hints(_HINTS_A_STEP, "storage was detached")
        if gone and len(wish.answers) == self._num_ranks:
            assert wish.tally is not None, "it was begun"
            kept = any(answer.memory_kept for answer in wish.answers.values())
            self._end(wish, result=wish.tally.report(kept).to_dict())
        return None

    def answered(self, answers: Sequence[StoreAnswer]) -> None:
        """Take note of what ranks say of the order under way."""
        wish = self._wish
        for answer in answers:
            if wish is not None and answer.order_id == wish.order.id:
                wish.answers[answer.rank] = answer

    def close(self) -> None:
        """Let who waits wait no longer."""
        with self._mail:
            self._closed = True
            wish = self._wish
        if wish is not None:
            self._end(wish, error=ClosedError("this engine is being shut down"))

    def _begin(self, wish: _Wish) -> StoreOrder | None:
        attached, opens = self._attached, wish.order.act is StoreAct.OPEN
        if opens and attached is not None:
            remedy = "Detach it first: kvhoist detach."
            self._end(wish, error=StorageError("this engine has a store already", got=self.state, remedy=remedy))
        elif opens:
            return wish.order
        elif attached is None:
            self._end(wish, error=StorageError("there is no store to detach", got=self.state))
        else:
            wish.tally = DetachTally(attached, self._plane)
            self._plane.detach_storage()
            self._attached = None
            self._detached = f"; {attached} was detached at {datetime.now().astimezone():%Y-%m-%d %H:%M:%S}"
            return wish.order
        return None

    def _use(self, wish: _Wish) -> StoreOrder:
        answers = wish.answers.values()
        failed = [f"rank {answer.rank}: {answer.error}" for answer in answers if answer.error is not None]
        if not failed:
            try:
                self._plane.attach_storage(persists=all(answer.persists for answer in answers))
            except ConfigError as error:
                failed = [str(error)]
        if failed:
            self._end(wish, error=StorageError("the store cannot be attached", got="; ".join(failed)))
            return StoreOrder(-wish.order.id, StoreAct.GIVE_UP)
        self._attached = wish.order.address
        self._end(wish, result={"store": self.state})
        return StoreOrder(wish.order.id, StoreAct.USE)

    def _end(self, wish: _Wish, *, result: Mapping[str, Any] | None = None, error: Exception | None = None) -> None:
        with self._mail:
            self._wish = None
            if wish.future.done():
                return
            if error is not None:
                wish.future.set_exception(error)
            else:
                wish.future.set_result(result or {})
