"""Waiting for a copy that is in a device's queues: by layer, by stream, and for its source."""

from __future__ import annotations

import threading

import pytest

from kvhoist.errors import TransferError
from kvhoist.messages import Completion, Job, JobKind
from kvhoist.platform.cpu import CpuEvent
from kvhoist.transfer import Transfer

LAYERS = (0, 1, 2, 5)


class Stream:
    """Notes what it was told to wait for."""

    priority = None

    def __init__(self) -> None:
        self.waits: list[object] = []

    def wait(self, event: object) -> None:
        self.waits.append(event)


@pytest.fixture
def load() -> Transfer:
    return Transfer(Job(3, JobKind.LOAD, bytes(32), 0, (b"k",), (0,), (0,)), LAYERS)


def test_a_layer_is_there_with_the_first_mark_that_covers_it(load: Transfer) -> None:
    marks, stream = [(2, CpuEvent()), (4, CpuEvent())], Stream()
    load.enqueued(marks, CpuEvent())
    for layer in LAYERS:
        load.wait(layer, stream=stream)  # type: ignore[arg-type]
    load.wait(stream=stream)  # type: ignore[arg-type]
    first, last = marks[0][1], marks[1][1]
    assert stream.waits == [first, first, last, last, last]


def test_a_thread_that_waits_for_a_layer_goes_on_with_its_event(load: Transfer) -> None:
    first = CpuEvent()
    load.enqueued([(2, first), (4, CpuEvent())], CpuEvent())
    with pytest.raises(TimeoutError):
        load.wait(1, timeout_s=0.01)
    first.set()
    load.wait(1, timeout_s=1)
    with pytest.raises(TimeoutError):
        load.wait(2, timeout_s=0.01)
    with pytest.raises(TimeoutError):
        load.wait(timeout_s=0.01)  # the whole transfer is over when it is answered


def test_a_stream_waits_for_a_copy_that_is_enqueued_later(load: Transfer) -> None:
    stream, mark, read = Stream(), CpuEvent(), CpuEvent()
    waiting = [
        threading.Thread(target=load.wait, args=(0,), kwargs={"stream": stream}),
        threading.Thread(target=load.wait_read, args=(stream,)),
    ]
    for thread in waiting:
        thread.start()
    load.enqueued([(4, mark)], read)
    for thread in waiting:
        thread.join(10)
    assert set(stream.waits) == {mark, read}


def test_an_answered_transfer_needs_no_event_and_tells_what_failed(load: Transfer) -> None:
    stream = Stream()
    load.finish(Completion(3, 0))
    load.wait(1, stream=stream)  # type: ignore[arg-type]
    load.wait_read(stream)  # type: ignore[arg-type]
    assert stream.waits == []
    failed = Transfer(load.job, LAYERS)
    failed.finish(Completion.failed(load.job, 0, "planted"))
    with pytest.raises(TransferError, match="planted"):
        failed.wait(1, stream=stream)  # type: ignore[arg-type]
    failed.wait_read(stream)  # type: ignore[arg-type]
