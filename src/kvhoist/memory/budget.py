"""How much host memory this process may still take: the machine, every cgroup above it, and its own limits."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from kvhoist.system_files import text_of
from kvhoist.units import format_bytes

_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""

_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
"""By cgroup version: the files with limits, the file with the usage, and what of it the kernel would give back."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing that bounds memory: what is left of `total_bytes`, and the file or call that says so."""

    name: str
    available_bytes: int
    total_bytes: int
    source: str

    def __str__(self) -> str:
        left, total = format_bytes(self.available_bytes), format_bytes(self.total_bytes)
        return f"{self.name}: {left} of {total} left ({self.source})"


@dataclass(frozen=True, slots=True)
class Budget:
    """All limits that apply now, the tightest first. It is a snapshot: other processes allocate too."""

    limits: tuple[Limit, ...]

    @property
    def available_bytes(self) -> int:
        """Bytes that fit under every limit; page cache that the kernel would give back counts as available."""
        return self.limits[0].available_bytes

    @property
    def tightest(self) -> Limit:
        return self.limits[0]


def host_budget(root: Path = Path("/")) -> Budget:
    """Return the limits on ordinary (not pinned) host memory of this process.

    `root` is where `proc` and the paths in its mountinfo stand, for tests. An absent or unreadable file is no limit.
    """
    machine = _meminfo(root / "proc/meminfo")
    limits = [
        Limit("machine", machine.get("MemAvailable", _UNLIMITED_BYTES), machine.get("MemTotal", _UNLIMITED_BYTES),
              "/proc/meminfo"),
        *_cgroup_limits(root),
        *_process_limits(root),
    ]  # fmt: skip
    return Budget(tuple(sorted(limits, key=lambda limit: limit.available_bytes)))


def memlock_limit_bytes() -> int | None:
    """Return how many bytes this process may lock (RLIMIT_MEMLOCK), None for no limit. It bounds `mlock` and io_uring's
    fixed buffers; GPU drivers pin host memory outside of it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _meminfo(path: Path) -> dict[str, int]:
    fields = (line.split() for line in text_of(path).splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) > 2 and words[2] == "kB"}


def _process_limits(root: Path) -> list[Limit]:
    status = _meminfo(root / "proc/self/status")
    found = []
    for name, which, field in (
        ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
        ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
    ):
        soft, _ = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY:
            found.append(
                Limit(name, max(0, soft - status.get(field, 0)), soft, f"ulimit, {field} in /proc/self/status")
            )
    return found


def _cgroup_limits(root: Path) -> list[Limit]:
    """A process stands under the limit of its own group and of every group above it that this mount shows."""
    found = []
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            version = 2 if controllers == "" else 1
            for mount_root, mount_point in _cgroup_mounts(root, version):
                for folder in _folders(root, mount_root, mount_point, path):
                    found += _group_limits(folder, version, root)
    return found


def _cgroup_mounts(root: Path, version: int) -> list[tuple[str, str]]:
    """Return (path of the group that is mounted, where) for the memory controller."""
    mounts = []
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        mount, _, rest = line.partition(" - ")
        kind, _, options = [*rest.split(), "", "", ""][:3]
        is_memory = kind == "cgroup2" if version == 2 else kind == "cgroup" and "memory" in options.split(",")
        if is_memory:
            words = mount.split()
            mounts.append((words[3], words[4]))
    return mounts


def _folders(root: Path, mount_root: str, mount_point: str, path: str) -> list[Path]:
    """Return the folders of the group and of those above it. In a container whose mount shows only its own subtree,
    `path` may be named from outside of it: then the mount point is the group."""
    top = root / mount_point.lstrip("/")
    outer = mount_root.rstrip("/")
    inside = path[len(outer) :] if path == outer or path.startswith(outer + "/") else ""
    names = [name for name in inside.split("/") if name not in ("", "..")]
    return [top.joinpath(*names[:depth]) for depth in range(len(names), -1, -1)]


def _group_limits(folder: Path, version: int, root: Path) -> list[Limit]:
    limit_files, usage_file, reclaimable = _FILES[version]
    usage = _number(folder / usage_file) or 0
    stat = (line.split() for line in text_of(folder / "memory.stat").splitlines())
    counts = {words[0]: int(words[1]) for words in stat if len(words) == 2}
    used = max(0, usage - counts.get(reclaimable, 0))
    found = []
    for name in limit_files:
        total = _number(folder / name)
        if total is not None and total < _UNLIMITED_BYTES:
            source = "/" + str((folder / name).relative_to(root))
            found.append(Limit(f"cgroup v{version}", max(0, total - used), total, source))
    return found


def _number(path: Path) -> int | None:
    text = text_of(path).strip()
    return int(text) if text.isdigit() else None
