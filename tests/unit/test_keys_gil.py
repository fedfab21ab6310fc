"""Hashing does not give up the GIL: getting it back from busy I/O threads would cost a scheduler milliseconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from kvhoist.control.keys import TokenChain, chain_hashes


class Bystander:
    """A thread that notes when it gets the GIL. The interpreter is told to never take the GIL from the thread that has
    it, so that happens only where that thread gives it up itself."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self.ran = threading.Event()

    def _run(self) -> None:
        with self._gate:
            self.ran.set()

    def sees(self, act: Callable[[], object]) -> bool:
        """Tell whether the thread got the GIL while `act` ran again and again, for much longer than a wake-up takes."""
        thread = threading.Thread(target=self._run)
        thread.start()
        before = sys.getswitchinterval()
        sys.setswitchinterval(1000.0)
        try:
            self._gate.release()
            until = time.perf_counter() + 0.2
            while time.perf_counter() < until and not self.ran.is_set():
                act()
            return self.ran.is_set()
        finally:
            sys.setswitchinterval(before)
            thread.join()


def test_hashing_keeps_the_gil_so_that_a_scheduler_does_not_queue_behind_io_threads() -> None:
    tokens = list(range(3000, 7000))
    kinds = [tokens, tuple(tokens), *(np.array(tokens, dtype) for dtype in (np.uint32, np.int64, np.int32))]
    chain = TokenChain(16)

    def hash_all() -> None:
        for kind in kinds:
            chain.keys(kind)
            TokenChain(16, vocab_size=7000).keys(kind)
            chain_hashes(kind, 16)

    assert not Bystander().sees(hash_all)
    assert Bystander().sees(lambda: np.array_equal(tokens, tokens)), "numpy gives it up for as many tokens"
