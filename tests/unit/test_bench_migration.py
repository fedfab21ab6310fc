"""The page-migration benchmark: what it checks is seen where it is planted, and a simulated run says that it is one."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvhoist.bench import migration
from kvhoist.bench.kfd import HostPid
from kvhoist.bench.migration_child import GTT, REGISTERED, run_simulated
from kvhoist.bench.migration_kernel import SimulatedKernel
from kvhoist.bench.migration_loop import COPY_BYTES, MOVE_BYTES, Rig, measure, migrate
from kvhoist.bench.plot import plot, title_of
from kvhoist.cli import app
from kvhoist.errors import KvhoistError
from kvhoist.platform.base import Device, Stream
from kvhoist.platform.cpu import CpuPlatform
from kvhoist.platform.page_moves import PAGE_BYTES

POOL_BYTES = 32 << 20
PAGES = MOVE_BYTES // PAGE_BYTES
DEVICE = Device("cuda")


def rig_of(
    kernel: SimulatedKernel, *, platform: CpuPlatform | None = None, compute: Callable[[], object] = lambda: None
) -> Rig:
    platform = platform or CpuPlatform()
    return Rig(platform, platform.make_stream(), compute, kernel)


# -- the loop --------------------------------------------------------------------------------------------------------


def test_an_arm_moves_there_and_back_three_times_and_compares() -> None:
    answer = run_simulated(REGISTERED, POOL_BYTES, 3)
    assert [len(part) for part in answer["times_s"]] == [3, 3, 3]
    assert [(m["attempt"], m["to_node"], m["moved"]) for m in answer["migrations"]] == [
        (attempt, node, PAGES) for attempt in (1, 2, 3) for node in (1, 0)
    ]
    assert answer["compared"] == 4
    assert answer["evicted_ms"] > 0


def test_pages_that_a_driver_owns_do_not_move_and_evict_nothing() -> None:
    answer = run_simulated(GTT, POOL_BYTES, 2)
    assert [m["answers"] for m in answer["migrations"]] == [{"EFAULT": PAGES}] * 6
    assert [m["are"] for m in answer["migrations"]] == [{"EFAULT": PAGES}] * 6
    assert (answer["evicted_ms"], sum(m["moved"] for m in answer["migrations"])) == (0, 0)


class Corrupting(CpuPlatform):
    """Spoils one byte of copy number `which`, as it arrives."""

    def __init__(self, which: int, offset: int) -> None:
        self._left, self._offset = which, offset

    def copy(self, source: int, destination: int, num_bytes: int, stream: Stream) -> None:
        super().copy(source, destination, num_bytes, stream)
        self._left -= 1
        if self._left == 0:
            ctypes.c_uint8.from_address(destination + self._offset).value ^= 1


class Losing(CpuPlatform):
    """Leaves out copy number `which`: the device keeps what the one before brought."""

    def __init__(self, which: int) -> None:
        self._left = which

    def copy(self, source: int, destination: int, num_bytes: int, stream: Stream) -> None:
        self._left -= 1
        if self._left:
            super().copy(source, destination, num_bytes, stream)


FIRST_OF_ATTEMPT_1 = 22  # after 20 to warm up and their comparison


@pytest.mark.parametrize("offset", [0, 4097, COPY_BYTES - 1])
def test_one_wrong_byte_that_arrives_fails_the_run(offset: int) -> None:
    rig = rig_of(SimulatedKernel(driver_owned=True), platform=Corrupting(FIRST_OF_ATTEMPT_1, offset))
    with pytest.raises(
        KvhoistError, match=rf"got 1 wrong bytes of {COPY_BYTES}, the first at {offset}, in iteration 21"
    ):
        measure(rig, pool_bytes=POOL_BYTES, iterations=1)


def test_a_copy_that_did_not_happen_fails_the_run() -> None:
    rig = rig_of(SimulatedKernel(driver_owned=True), platform=Losing(FIRST_OF_ATTEMPT_1))
    with pytest.raises(KvhoistError, match=r"other bytes arrived on the device.*in iteration 21"):
        measure(rig, pool_bytes=POOL_BYTES, iterations=1)


def test_an_iteration_that_stalls_shows_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only work moves on: 1 ms an iteration, 64 s one of them."""
    clock = [0.0]
    done = [0]

    def compute() -> None:
        done[0] += 1
        clock[0] += 64.0 if done[0] == 20 + 12 + 5 else 1e-3

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    answer = measure(rig_of(SimulatedKernel(driver_owned=True), compute=compute), pool_bytes=POOL_BYTES, iterations=12)
    row = migration.row_of(GTT, answer)
    assert (row["median_ms"], row["worst_ms"]) == (pytest.approx(1), pytest.approx(64_000))
    assert row["worst_is"] == "iteration 5 after attempt 2"
    assert (row["stalled_iterations"], row["stalled_ms"]) == (1, pytest.approx(64_000))
    calm = migration.row_of(GTT, {**answer, "times_s": [[1e-3] * 12] * 3})
    assert (calm["stalled_iterations"], calm["stalled_ms"]) == (0, 0)


# -- moves -----------------------------------------------------------------------------------------------------------


class Stubborn(SimulatedKernel):
    """Lies about its moves: says that all pages moved, and moves the first `moved` of them."""

    def __init__(self, moved: int) -> None:
        super().__init__(driver_owned=False)
        self._moved = moved

    def move(self, pages: Sequence[int], node: int) -> list[int]:
        super().move(pages[: self._moved], node)
        return [node] * len(pages)


@pytest.mark.parametrize("moved", [0, PAGES - 1])
def test_a_move_that_did_not_happen_is_told_whatever_the_call_answers(moved: int) -> None:
    answer = measure(rig_of(Stubborn(moved)), pool_bytes=POOL_BYTES, iterations=1)
    assert [m["moved"] for m in answer["migrations"]] == [moved] * 6
    row = migration.row_of(REGISTERED, answer)
    assert row["pass"] is False
    assert row["moved_pages"] == 6 * moved
    assert f"attempt 3: {PAGES - moved} of {PAGES} pages did not move to node 1" in row["verdict"]


def test_pages_begin_where_most_of_them_are(pages: list[int]) -> None:
    kernel = SimulatedKernel(driver_owned=False)
    kernel.move(pages[:3], 1)
    there, back = migrate(kernel, pages)
    assert (there["to_node"], there["moved"]) == (0, 3), "a page that was there already has not moved"
    assert (back["to_node"], back["moved"]) == (1, 4)


@pytest.fixture
def pages() -> list[int]:
    """Four pages, on page boundaries, of memory that lives as long as the module."""
    first = ctypes.addressof(_MEMORY)
    return list(range(first + -first % PAGE_BYTES, first + len(_MEMORY) - PAGE_BYTES + 1, PAGE_BYTES))[:4]


_MEMORY = (ctypes.c_uint8 * (5 * PAGE_BYTES))()


def answer_of(evicted_ms: int = 0, **more: Any) -> dict[str, Any]:
    move = {"attempt": 1, "to_node": 1, "pages": 8, "moved": 0, "answers": {"EFAULT": 8}, "are": {"EFAULT": 8}, "ms": 0}
    return {"times_s": [[1e-3] * 4], "migrations": [{**move, **more}], "evicted_ms": evicted_ms, "compared": 1}


@pytest.mark.parametrize(
    ("arm", "answer", "verdict"),
    [
        (GTT, answer_of(), "as it must be"),
        (GTT, answer_of(evicted_ms=1), "queues were evicted for 1 ms"),
        (
            GTT,
            answer_of(answers={"EFAULT": 7, "EBUSY": 1}),
            "pages that must not be movable answered 7 EFAULT, 1 EBUSY",
        ),
        (GTT, answer_of(answers={"not tried": 8}), "pages that must not be movable answered 8 not tried"),
        (GTT, answer_of(moved=1), "pages that must not be movable"),
        (REGISTERED, answer_of(moved=8, evicted_ms=64_000), "as it must be"),
        (REGISTERED, answer_of(), "8 of 8 pages did not move to node 1 (8 EFAULT)"),
        (REGISTERED, answer_of(moved=7, are={"node 1": 7, "EBUSY": 1}), "1 of 8 pages did not move to node 1"),
    ],
)
def test_verdicts(arm: str, answer: dict[str, Any], verdict: str) -> None:
    row = migration.row_of(arm, answer)
    assert verdict in row["verdict"]
    assert row["pass"] is (verdict == "as it must be")


# -- what stands for the machine ---------------------------------------------------------------------------------------


def test_a_simulated_result_says_so_in_every_part() -> None:
    done = CliRunner().invoke(app, ["bench", "migration", "--simulate", "--json"])
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["simulated"], result["smoke"]) == (True, True)
    assert result["note"].startswith("SIMULATED")
    assert all(row["arm"].endswith(" (simulated)") for row in (*result["results"], *result["migrations"]))
    assert "device" not in result
    assert '"pass"' not in done.stdout, "a simulated run has judged something"


def test_a_real_result_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = {"name": "an AMD GPU"}
    seen: list[tuple[str, dict[str, str]]] = []

    def answer(_: str, arm: str, index: int, *rest: object, environment: dict[str, str]) -> dict[str, Any]:
        seen.append((arm, environment))
        assert (index, rest) == (0, (8 << 30, 1000, HostPid.FIND))
        moved = {"moved": 8, "answers": {"node 1": 8}, "are": {"node 1": 8}} if arm == REGISTERED else {}
        return {**answer_of(**moved), "host_pid": 17, "device": device}

    monkeypatch.setattr(migration, "run_fresh", answer)
    monkeypatch.setattr(migration, "check_machine", lambda device: None)
    result = migration.run(DEVICE, gib=8)
    assert (result["simulated"], result["smoke"], result["pass"]) == (False, False, True)
    assert "note" not in result
    assert [row["arm"] for row in result["results"]] == [REGISTERED, GTT]
    assert seen == [(REGISTERED, {"HSA_USERPTR_FOR_PAGED_MEM": "1"}), (GTT, {"HSA_USERPTR_FOR_PAGED_MEM": "0"})]
    assert title_of(result) == f"kvhoist bench migration: an AMD GPU, {result['date'][:10]}"
    if importlib.util.find_spec("matplotlib"):
        plot(result, tmp_path / "migration.svg")
        assert (tmp_path / "migration.svg").stat().st_size > 1000


def test_what_an_arm_refuses_is_the_commands_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "run_fresh", lambda *_, **__: {"refused": "no; got this. Do that."})
    monkeypatch.setattr(migration, "check_machine", lambda device: None)
    done = CliRunner().invoke(app, ["bench", "migration"])
    assert (done.exit_code, done.stderr) == (2, "error: no; got this. Do that.\n")
