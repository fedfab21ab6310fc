"""How the kernels cut a run: one rule for the plan, for the screen on the host, and, as constants, for the kernel.

A copy group of 32 threads moves a run in rounds. In a round each thread, a lane, moves one word: the widest of 16, 8
and 4 bytes that divides the run and all its places. So a round is 512, 256 or 128 bytes. `unroll` rounds make a piece,
all of whose loads are under way before its first store; what is no whole piece, the tail, goes round by round, and in
the last one lanes without a word idle. A round need not divide a run: every multiple of 4 bytes has a path, where rules
of whole rounds alone lose some. 576 B (MLA in fp8) is a round and 4 lanes of another, 1,152 B (bf16) two and 8 lanes.

relayout.cuh has the same rule as `Rounds`, from the constants here: words that the host admits and the kernel lacks do
not compile, nor do words that the kernel has and the host refuses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvhoist.copy.nests import Nest

WORDS = (16, 8, 4)
"""Bytes that a lane moves at once: the kernels are called relayout16, relayout8 and relayout4."""

GROUP_THREADS = 32
"""Threads by number, not a warp: a wavefront of 64 lanes holds two groups."""

UNROLL = 8
MAX_BLOCK_THREADS = 1024
MAX_LOOPS = 4
DEFINES: dict[str, int | str] = {
    "GROUP_THREADS": GROUP_THREADS,
    "UNROLL": UNROLL,
    "WORDS": ",".join(map(str, WORDS)),
    "MAX_BLOCK_THREADS": MAX_BLOCK_THREADS,
}


@dataclass(frozen=True, slots=True)
class CopyRounds:
    """The rule's outcome for runs that are moved by words of `word_bytes`."""

    word_bytes: int
    unroll: int = UNROLL

    @property
    def round_bytes(self) -> int:
        return self.word_bytes * GROUP_THREADS

    @property
    def piece_bytes(self) -> int:
        return self.round_bytes * self.unroll

    def pieces_of(self, run_bytes: int) -> int:
        """Return how many pieces a run is cut into, its tail included."""
        return -(-run_bytes // self.piece_bytes)

    def __str__(self) -> str:
        return f"{GROUP_THREADS} lanes x {self.word_bytes} B = {self.round_bytes} B, {self.unroll} at once"


def rounds_for(divisor_bytes: int, *, unroll: int = UNROLL) -> CopyRounds | None:
    """Return how runs are moved whose lengths and places are all multiples of `divisor_bytes`; None where no word
    divides it. Valid for every platform."""
    word = next((word for word in WORDS if divisor_bytes % word == 0), None)
    return None if word is None else CopyRounds(word, unroll)


def rounds_of(nests: Sequence[Nest]) -> CopyRounds | None:
    """Return how the kernels move `nests`; None where they cannot: no word divides all numbers, or too many loops."""
    return rounds_for(divisor_of(nests)) if loops_of(nests) <= MAX_LOOPS else None


def divisor_of(nests: Sequence[Nest]) -> int:
    """Return the greatest common divisor of all runs and places."""
    return math.gcd(*(number for nest in nests for number in nest.numbers()))


def loops_of(nests: Sequence[Nest]) -> int:
    """Return how many loops the deepest nest has."""
    return max(len(nest.axes) for nest in nests)


def refusal_of(nests: Sequence[Nest]) -> str:
    """Return in words what of `nests` the kernels cannot move."""
    divisor = divisor_of(nests)
    return f"runs and places aligned to {divisor & -divisor} B, {loops_of(nests)} loops"


SERVED = f"multiples of {WORDS[-1]} B in at most {MAX_LOOPS} loops"
"""What the kernels can move, in words."""
