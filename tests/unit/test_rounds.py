"""The copy-round rule: the same answer from the rule, the host's screen and the kernel's constants, for every row."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kernel_shim
import numpy as np
import pytest

from kvhoist.copy.choose import choose_engines
from kvhoist.copy.nests import Axis, End, Nest
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.relayout import SOURCE, RelayoutParameters, word_bytes_of
from kvhoist.copy.rounds import DEFINES, GROUP_THREADS, MAX_LOOPS, UNROLL, CopyRounds, rounds_for, rounds_of
from kvhoist.device_layout import read_device_layout
from kvhoist.errors import ConfigError
from kvhoist.geometry import CacheGeometry
from kvhoist.layout import HostOrder, host_layout
from kvhoist.platform.base import Device, MemoryRegion
from kvhoist.platform.cuda import CAPABILITIES

MOST = 8192
BRANCHES = ("nvidia", "amd")
NUM_ROWS, GUARD = 3, 64

CONSTANTS = """
template <i64 ROW> static void row(u32* out) {
    typedef Rounds<ROW> R;
    out[0] = R::word_bytes; out[1] = R::round_bytes; out[2] = R::pieces; out[3] = R::tail_bytes;
}
extern "C" void constants(u32* out) { %s }
"""


class Offered:
    name, device, capabilities = "offered", Device("cuda"), CAPABILITIES


def built(folder: Path, branch: str, rows: Sequence[int] = (), **options: Any) -> ctypes.CDLL:
    """Compile a branch of the kernel, and a function that writes its constants for `rows`, those that have any."""
    if kernel_shim.compiler(rocm=branch == "amd") is None:
        pytest.skip(f"no compiler here for the branch of {branch}")
    calls = (f"row<{row}>(out + {4 * i});" for i, row in enumerate(row for row in rows if row % 4 == 0))
    more = CONSTANTS.replace("%s", "\n".join(calls))
    return kernel_shim.build(folder, rocm=branch == "amd", **{"more": more, **options})


def row_nest(row_bytes: int) -> Nest:
    end = End(0, 0, row_bytes)
    return Nest(end, end, row_bytes)


def moves_whole(library: ctypes.CDLL, row_bytes: int, word_bytes: int) -> bool:
    """Gather rows that lie twice their length apart, and tell whether they came whole and nothing else was written."""
    source, target = (_aligned(2 * row_bytes * NUM_ROWS + GUARD) for _ in range(2))
    source[:] = np.random.default_rng(row_bytes).integers(0, 256, len(source), dtype=np.uint8)
    target[:] = 0xEE
    place = np.array([_address(source), _address(target)], dtype=np.int64)
    parameters = RelayoutParameters(
        places=_address(place), num_places=1, num_steps=NUM_ROWS, run_bytes=row_bytes, length=(1, 1, 1, 1)
    )
    parameters.src.unit_stride, parameters.dst.unit_stride = 2 * row_bytes, row_bytes
    parameters.src.per_unit = parameters.dst.per_unit = 1
    kernel_shim.run(library, word_bytes, parameters, 1, 2 * GROUP_THREADS)
    rows = source[: 2 * row_bytes * NUM_ROWS].reshape(NUM_ROWS, 2, row_bytes)[:, 0]
    end = row_bytes * NUM_ROWS
    return bool((target[:end] == rows.reshape(-1)).all() and (target[end:] == 0xEE).all())


def _aligned(num_bytes: int) -> np.ndarray:
    raw = np.zeros(num_bytes + 16, dtype=np.uint8)
    start = -_address(raw) % 16
    return raw[start : start + num_bytes]


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def rows_in_dispute(library: ctypes.CDLL, unroll: int, rows: Sequence[int]) -> list[int]:
    """Return the rows for which the rule, the screen of the engines, the kernel's constants (the library was built for
    these rows) and what the kernel does are not all the same."""
    constants = np.zeros((len(rows), 4), dtype=np.uint32)
    library.constants(ctypes.c_void_p(_address(constants)))
    compiled = iter(constants.tolist())
    found = []
    for row_bytes in rows:
        rounds, screened = rounds_for(row_bytes, unroll=unroll), _screened(row_bytes)
        if row_bytes % 4:
            agreed = rounds is None and screened is None
        else:
            assert rounds is not None, f"{row_bytes} B has no path"
            cut = [rounds.word_bytes, rounds.round_bytes, rounds.pieces_of(row_bytes), row_bytes % rounds.piece_bytes]
            agreed = cut == next(compiled) and screened == rounds.word_bytes
            agreed = agreed and moves_whole(library, row_bytes, rounds.word_bytes)
        if not agreed:
            found.append(row_bytes)
    return found


def _screened(row_bytes: int) -> int | None:
    try:
        return word_bytes_of([row_nest(row_bytes)])
    except ConfigError:
        return None


@pytest.mark.parametrize("unroll", [1, 2, 4, 8])
@pytest.mark.parametrize("branch", BRANCHES)
def test_rule_screen_constants_and_kernel_agree_on_every_row(tmp_path: Path, branch: str, unroll: int) -> None:
    rows = range(1, MOST + 1)
    library = built(tmp_path, branch, rows, defines={**DEFINES, "UNROLL": unroll})
    assert rows_in_dispute(library, unroll, rows) == []


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(words + PIECE_WORDS - 1)", "(words + PIECE_WORDS)"),
        ("ROW_BYTES % (word_bytes * PIECE_WORDS)", "ROW_BYTES % (word_bytes * GROUP_THREADS)"),
        ("k < run_words", "k + 1 < run_words"),
        ("k < run_words", "k <= run_words"),
        ("pieces_of(run_words);", "run_words / PIECE_WORDS;"),
    ],
)
def test_a_kernel_with_another_rule_is_noticed(tmp_path: Path, branch: str, right: str, wrong: str) -> None:
    text = SOURCE.read_text()
    assert text.count(right) == 1
    rows = (1152, 4096, 8192)
    library = built(tmp_path, branch, rows, source=text.replace(right, wrong))
    assert rows_in_dispute(library, UNROLL, rows)


@pytest.mark.parametrize("row_bytes", [1, 2, 6, 574, 577, 578, 1150, MOST - 2])
def test_a_row_wrongly_admitted_does_not_compile(tmp_path: Path, row_bytes: int) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        built(tmp_path, "nvidia", more=f"u32 wrong = Rounds<{row_bytes}>::round_bytes;")
    assert "no word of 16, 8 or 4 bytes divides this row" in caught.value.stderr


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("WORDS", "16,8,4,2", "the host admits rows that no word moves"),
        ("WORDS", "32,16,8,4", "the host admits rows that no word moves"),
        ("WORDS", "16,8", "the host refuses rows that a word moves"),
        ("GROUP_THREADS", 64, "a copy group is 32 threads"),
        ("UNROLL", 3, "rounds of a piece"),
        ("MAX_BLOCK_THREADS", 1000, "a block is whole groups"),
    ],
)
def test_constants_of_another_rule_do_not_compile(
    tmp_path: Path, branch: str, name: str, value: int | str, message: str
) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        built(tmp_path, branch, defines={**DEFINES, name: value})
    assert message in caught.value.stderr


@pytest.mark.parametrize(
    ("row_bytes", "word", "round_bytes", "lanes_of_last_round"),
    [(576, 16, 512, 4), (1152, 16, 512, 8), (132, 4, 128, 1), (584, 8, 256, 9), (8, 8, 256, 1), (4, 4, 128, 1)],
)
def test_boundary_rows(row_bytes: int, word: int, round_bytes: int, lanes_of_last_round: int) -> None:
    """576 B is MLA's row in fp8, 1,152 B in bf16, 132 B an indexer's."""
    rounds = rounds_for(row_bytes)
    assert rounds == CopyRounds(word, UNROLL)
    assert rounds.round_bytes == round_bytes
    assert row_bytes % round_bytes // word == lanes_of_last_round
    assert rounds.piece_bytes == UNROLL * round_bytes


def test_places_narrow_the_word_and_too_many_loops_have_no_path() -> None:
    end = End(0, 0, 4096)
    for offset, word in ((16, 16), (8, 8), (4, 4)):
        assert rounds_of([Nest(end, End(0, offset, 4096), 48)]) == CopyRounds(word)
    deep = Nest(end, end, 16, (Axis(2, 64, 64),) * (MAX_LOOPS + 1))
    assert rounds_of([deep]) is None
    with pytest.raises(ConfigError, match=f"{MAX_LOOPS + 1} loops; expected multiples of 4 B in at most 4 loops"):
        word_bytes_of([deep])


@pytest.mark.parametrize(("shift", "step"), [(0, 1), (2, 100), (4, 100), (16, 100)])
def test_auto_takes_a_kernel_where_and_only_where_the_kernels_can(shift: int, step: int) -> None:
    """By the rows and by where the cache's tensors lie: at `shift` bytes from an aligned address."""
    wrong = []
    for row_bytes in range(1, MOST + 1, step):
        group = CacheGeometry.attention(1, k_row_bytes=row_bytes, v_row_bytes=0, page_tokens=1).groups[0]
        tensor = np.zeros((2, 1, row_bytes), dtype=np.uint8)
        cache = read_device_layout(group, {"k": [tensor]}, "block token dim").layout
        plan = CopyPlan.make(host_layout(group, 2, HostOrder.PAGE_FIRST_DIRECT), cache)
        region = MemoryRegion(4096 + shift, tensor.nbytes, Device("cuda"))
        (choice, *_) = choose_engines(plan, Offered(), loads=True, staging_bytes=1 << 30, device=(region,))
        if (choice.engine == "dma") != bool(row_bytes % 4 or shift % 4):
            wrong.append(row_bytes)
    assert wrong == []
