"""The page-migration benchmark: what it checks is seen where it is planted, and where it cannot run it says why."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import io
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvhoist.bench import migration, migration_child, numa
from kvhoist.bench.kfd import HostPid, KfdProcess, check_kfd, find_process, processes
from kvhoist.bench.migration_child import GTT, REGISTERED, run_simulated
from kvhoist.bench.migration_kernel import SimulatedKernel
from kvhoist.bench.migration_loop import COPY_BYTES, MOVE_BYTES, Rig, measure, migrate
from kvhoist.bench.process import run_fresh
from kvhoist.cli import app
from kvhoist.errors import ConfigError, KvhoistError, MissingDependencyError
from kvhoist.platform.base import CPU, Device, Stream
from kvhoist.platform.cpu import CpuPlatform
from kvhoist.platform.page_moves import NOT_TRIED, PAGE_BYTES

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


def test_what_an_arm_refuses_is_the_commands_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "run_fresh", lambda *_, **__: {"refused": "no; got this. Do that."})
    monkeypatch.setattr(migration, "check_machine", lambda device: None)
    done = CliRunner().invoke(app, ["bench", "migration"])
    assert (done.exit_code, done.stderr) == (2, "error: no; got this. Do that.\n")


# -- refusals --------------------------------------------------------------------------------------------------------


def test_the_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got --device cpu; valid choices: cuda, cuda:1, --simulate"):
        migration.run(CPU)


def test_a_machine_without_amds_driver_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not one with ROCm.*got no folder .*/proc; .*--simulate"):
        check_kfd(tmp_path)
    (tmp_path / "proc").mkdir()
    check_kfd(tmp_path)


def test_a_machine_without_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "check_kfd", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="Install torch for ROCm"):
        migration.check_machine(DEVICE)


def test_torch_for_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from kvhoist.bench.migration_torch import check_hip

    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ConfigError, match=rf"not one for ROCm; got torch {re.escape(torch.__version__)}"):
        check_hip()
    monkeypatch.setattr(torch.version, "hip", "7.2.1")
    assert check_hip() == "7.2.1"


@pytest.mark.parametrize(
    ("there", "allowed", "message"),
    [
        (
            "0\n",
            "0",
            r"memory on node 0, of which this process may use node 0.*two nodes at least\. Run it on a machine",
        ),
        ("0-1\n", "1", r"memory on node 0, 1, of which this process may use node 1; .*--cpuset-mems 0,1"),
        ("0-1\n", "2-3", r"of which this process may use no node"),
        (None, "0", r"memory on node 0"),
    ],
)
def test_one_memory_node_is_refused(tmp_path: Path, there: str | None, allowed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        numa.memory_nodes(*_node_files(tmp_path, there, allowed))


def test_nodes_with_memory_that_the_process_may_use_are_taken(tmp_path: Path) -> None:
    assert numa.memory_nodes(*_node_files(tmp_path, "0-2,5\n", "0,2-9")) == (0, 2, 5)


def _node_files(folder: Path, there: str | None, allowed: str) -> tuple[Path, Path]:
    if there is not None:
        (folder / "has_memory").write_text(there)
    (folder / "status").write_text(f"Name:\tx\nMems_allowed:\t1\nMems_allowed_list:\t{allowed}\n")
    return folder / "has_memory", folder / "status"


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.EPERM, "--cap-add SYS_NICE"), (errno.EACCES, "--cpuset-mems"), (errno.ENOSYS, "CONFIG_MIGRATION")],
)
def test_a_kernel_that_moves_no_pages_is_refused(monkeypatch: pytest.MonkeyPatch, code: int, remedy: str) -> None:
    def refuse(pages: Sequence[int], node: int) -> list[int]:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(numa, "move_pages", refuse)
    with pytest.raises(ConfigError, match=rf"node 0; got {errno.errorcode[code]} from move_pages.*{remedy}"):
        numa.check_moves((0, 1))


def test_a_page_that_is_not_moved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {0: [0], 1: [NOT_TRIED]}
    monkeypatch.setattr(numa, "move_pages", lambda pages, node: answers[node])
    with pytest.raises(ConfigError, match="memory node 1; got not tried from move_pages; expected node 1"):
        numa.check_moves((0, 1))
    numa.check_moves((0,))


@pytest.mark.parametrize(("arm", "value"), [(GTT, None), (GTT, "1"), (GTT, "false"), (REGISTERED, "0")])
def test_the_other_arms_environment_is_refused(monkeypatch: pytest.MonkeyPatch, arm: str, value: str | None) -> None:
    monkeypatch.delenv("HSA_USERPTR_FOR_PAGED_MEM", raising=False)
    if value is not None:
        monkeypatch.setenv("HSA_USERPTR_FOR_PAGED_MEM", value)
    with pytest.raises(ConfigError, match=rf"not that of the arm {arm}; .*expected HSA_USERPTR_FOR_PAGED_MEM="):
        migration_child.run_on_gpu(arm, 0, HostPid.FIND, POOL_BYTES, 1)


def test_the_process_of_an_arm_answers_with_why_it_cannot_run() -> None:
    child = "kvhoist.bench.migration_child"
    answer = run_fresh(child, GTT, 0, POOL_BYTES, 1, "find", environment={"HSA_USERPTR_FOR_PAGED_MEM": "1"})
    assert answer["refused"].startswith("the environment is not that of the arm gtt; got HSA_USERPTR_FOR_PAGED_MEM")


# -- amdkfd ----------------------------------------------------------------------------------------------------------


def kfd_entry(root: Path, pid: int, *, gpus: dict[int, int], queues: Sequence[int] = ()) -> None:
    """Write what amdkfd tells of a process: `gpus` are milliseconds by GPU, `queues` the GPU of each."""
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    for gpu, evicted_ms in gpus.items():
        (folder / f"stats_{gpu}").mkdir()
        (folder / f"stats_{gpu}/evicted_ms").write_text(f"{evicted_ms}\n")
    for number, gpu in enumerate(queues):
        (folder / f"queues/{number}").mkdir(parents=True)
        (folder / f"queues/{number}/gpuid").write_text(f"{gpu}\n")


def test_evictions_are_those_of_the_gpu_where_they_were_longest(tmp_path: Path) -> None:
    kfd_entry(tmp_path, 7, gpus={111: 12, 222: 64_163})
    assert KfdProcess(7, tmp_path).evicted_ms() == 64_163


def test_a_driver_that_counts_no_evictions_is_refused(tmp_path: Path) -> None:
    kfd_entry(tmp_path, 7, gpus={})
    with pytest.raises(ConfigError, match=r"got no stats_\*/evicted_ms in .*/proc/7; .*Linux 5\.10"):
        KfdProcess(7, tmp_path).evicted_ms()


def test_a_process_finds_itself_by_its_pid_or_as_the_only_new_one(tmp_path: Path) -> None:
    kfd_entry(tmp_path, 7, gpus={1: 0})
    before = processes(tmp_path)
    kfd_entry(tmp_path, 4711, gpus={1: 0})
    assert find_process(before, root=tmp_path).pid == 4711
    kfd_entry(tmp_path, os.getpid(), gpus={1: 0})
    assert find_process(before, root=tmp_path).pid == os.getpid()


def test_a_process_that_cannot_be_told_from_others_asks_for_its_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kfd_entry(tmp_path, 7, gpus={1: 0})
    before = processes(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be told; got \[\] as new ones"):
        find_process(before, root=tmp_path)
    outside = os.getpid() + 1
    for pid in (outside, outside + 1):
        kfd_entry(tmp_path, pid, gpus={1: 0})
    with pytest.raises(ConfigError, match=rf"got \[{outside}, {outside + 1}\] as new ones; .*--host-pid ask"):
        find_process(before, root=tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{outside + 1}\n7\nx\n"))
    assert find_process(before, HostPid.ASK, tmp_path).pid == outside + 1
    with pytest.raises(ConfigError, match="got '7'"):
        find_process(before, HostPid.ASK, tmp_path)
    with pytest.raises(ConfigError, match="got 'x'"):
        find_process(before, HostPid.ASK, tmp_path)


def test_a_gpu_that_others_use_is_refused(tmp_path: Path) -> None:
    kfd_entry(tmp_path, 7, gpus={111: 0}, queues=[111, 111])
    kfd_entry(tmp_path, 8, gpus={111: 0, 222: 0}, queues=[222])
    kfd_entry(tmp_path, 9, gpus={111: 0})
    KfdProcess(7, tmp_path).check_alone()
    kfd_entry(tmp_path, 10, gpus={111: 0}, queues=[222, 111])
    with pytest.raises(ConfigError, match=r"others use this GPU too.*queues of process 10 .*choose another GPU"):
        KfdProcess(7, tmp_path).check_alone()
