"""Where the page-migration benchmark cannot run it says why; what amdkfd tells of processes is read as it writes it."""

from __future__ import annotations

import errno
import importlib.util
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvhoist.bench import migration, migration_child, numa
from kvhoist.bench.kfd import HostPid, KfdProcess, check_kfd, find_process, processes
from kvhoist.bench.migration_child import GTT, REGISTERED
from kvhoist.bench.process import run_fresh
from kvhoist.errors import ConfigError, MissingDependencyError
from kvhoist.platform.base import CPU, Device
from kvhoist.platform.page_moves import NOT_TRIED

DEVICE = Device("cuda")
POOL_BYTES = 32 << 20


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
