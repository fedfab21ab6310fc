"""The memory budget, from files as kernels and container runtimes write them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kvhoist.memory.budget import host_budget, memlock_limit_bytes

MEMINFO = "MemTotal:       1000 kB\nMemFree:        100 kB\nMemAvailable:    800 kB\n"
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V1_UNLIMITED = "9223372036854771712"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(where: str, limit: str, usage: str, inactive: str = "0", high: str = "max") -> dict[str, str]:
    return {
        f"{where}/memory.max": limit + "\n",
        f"{where}/memory.high": high + "\n",
        f"{where}/memory.current": usage + "\n",
        f"{where}/memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def group_v1(where: str, limit: str, usage: str, inactive: str = "0") -> dict[str, str]:
    return {
        f"{where}/memory.limit_in_bytes": limit + "\n",
        f"{where}/memory.usage_in_bytes": usage + "\n",
        f"{where}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


def test_a_machine_without_cgroups_offers_what_the_kernel_says(tmp_path: Path) -> None:
    budget = host_budget(write(tmp_path, {}))
    assert budget.available_bytes == 800 * 1024
    assert budget.tightest.name == "machine"
    assert "/proc/meminfo" in str(budget.tightest)


def test_every_nested_v2_group_bounds(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": V2_MOUNT.format(root="/")}
    inner, outer = group("sys/fs/cgroup/a/b", "max", "900"), group("sys/fs/cgroup/a", "400000", "150000", "50000")
    budget = host_budget(write(tmp_path, files | inner | outer))
    assert budget.available_bytes == 400000 - (150000 - 50000)
    assert budget.tightest.source == "/sys/fs/cgroup/a/memory.max"
    inner = group("sys/fs/cgroup/a/b", "200000", "900")
    assert host_budget(write(tmp_path, inner)).tightest.source == "/sys/fs/cgroup/a/b/memory.max"


def test_memory_high_bounds_too(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNT.format(root="/")}
    budget = host_budget(write(tmp_path, files | group("sys/fs/cgroup/a", "400000", "100", high="300000")))
    assert budget.tightest.source.endswith("memory.high")
    assert budget.available_bytes == 300000 - 100


def test_a_container_sees_its_own_group_at_the_mount_point(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT.format(root="/")}
    assert host_budget(write(tmp_path, files | group("sys/fs/cgroup", "5000", "1000"))).available_bytes == 4000


def test_v1_groups_bound_and_their_mount_may_show_a_subtree_only(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc/job\n0::/\n",
        "proc/self/mountinfo": V1_MOUNT.format(root="/docker/abc"),
    }
    top, job = "sys/fs/cgroup/memory", "sys/fs/cgroup/memory/job"
    found = host_budget(write(tmp_path, files | group_v1(top, "9000", "500", "100") | group_v1(job, V1_UNLIMITED, "1")))
    assert found.available_bytes == 9000 - 400
    assert found.tightest.name == "cgroup v1"
    assert not any(limit.source.startswith("/" + job) for limit in found.limits)


def test_a_path_from_outside_of_the_mount_means_the_mount_point(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/elsewhere/abc\n",
        "proc/self/mountinfo": V1_MOUNT.format(root="/docker/abc"),
    }
    assert host_budget(write(tmp_path, files | group_v1("sys/fs/cgroup/memory", "7000", "0"))).available_bytes == 7000


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNT.format(root="/")}
    assert host_budget(write(tmp_path, files | group("sys/fs/cgroup/a", "100", "900"))).available_bytes == 0


def test_damaged_files_bound_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a\n",
        "proc/self/mountinfo": "nonsense\n" + V2_MOUNT.format(root="/"),
        "sys/fs/cgroup/a/memory.max": "what\n",
    }
    assert host_budget(write(tmp_path, files)).available_bytes == 800 * 1024
    assert host_budget(tmp_path / "empty").available_bytes > 1 << 50


def test_address_space_limits_of_the_process_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: 500 * 1024, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], resource.RLIM_INFINITY))
    budget = host_budget(write(tmp_path, {"proc/self/status": "Name:\tpython\nVmSize:\t    300 kB\nVmData:\t 5 kB\n"}))
    assert budget.tightest.name == "RLIMIT_AS"
    assert budget.available_bytes == 200 * 1024


def test_the_locking_limit_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8192, 8192))
    assert memlock_limit_bytes() == 8192
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert memlock_limit_bytes() is None


def test_this_machine_has_memory() -> None:
    assert host_budget().available_bytes > 0
