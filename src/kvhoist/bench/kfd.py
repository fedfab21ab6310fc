"""What AMD's kernel driver (amdkfd) tells of the processes that use its GPUs, in sysfs.

`proc/PID/stats_GPU/evicted_ms` counts the milliseconds for which a process's queues on a GPU were evicted, added when
they run again; `proc/PID/queues/N/gpuid` names the GPU of each of its queues. PID is the host's, also in a container.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path

from kvhoist.errors import ConfigError
from kvhoist.system_files import text_of

KFD = Path("/sys/class/kfd/kfd")


class HostPid(StrEnum):
    """How a process learns by which pid the host knows it: by what is new in sysfs, or from a line of its stdin."""

    FIND = "find"
    ASK = "ask"


def check_kfd(root: Path = KFD) -> None:
    """Raise ConfigError where this machine has no AMD GPU, or its driver cannot be asked."""
    if not (root / "proc").is_dir():
        raise ConfigError(
            "this machine is not one with ROCm: the driver of AMD's GPUs (amdkfd) tells nothing of its processes",
            got=f"no folder {root / 'proc'}",
            expected="one, for how long queues were evicted",
            remedy="Run it where an AMD GPU is (in a container with /dev/kfd, /dev/dri and /sys), or with --simulate.",
        )


def processes(root: Path = KFD) -> frozenset[int]:
    """Return the host's pids of all processes that use GPUs now."""
    return frozenset(int(path.name) for path in (root / "proc").iterdir() if path.name.isdigit())


def find_process(before: frozenset[int], how: HostPid = HostPid.FIND, root: Path = KFD) -> KfdProcess:
    """Return this process, which began to use the GPU after `before` was read (see `HostPid`).

    Raises ConfigError where more than one process is new, or none, or the answer is none of them.
    """
    new = processes(root) - before
    if how is HostPid.ASK:
        answer = sys.stdin.readline().strip()
        found = {int(answer)} if answer.isdigit() else set()
        got = repr(answer)
    else:
        found = {os.getpid()} & new or set(new)
        got = f"{sorted(new)} as new ones"
    if len(found) != 1 or not found <= new:
        raise ConfigError(
            "by which pid the host knows this process cannot be told",
            got=got,
            expected=f"one of the processes that began to use GPUs since this one started: {sorted(new)}",
            remedy="Start it when nothing else starts on this machine's GPUs, or with --host-pid ask.",
        )
    return KfdProcess(found.pop(), root)


class KfdProcess:
    """One process that uses GPUs, by the host's pid."""

    def __init__(self, pid: int, root: Path = KFD) -> None:
        self.pid = pid
        self._root = root

    def evicted_ms(self) -> int:
        """Return the milliseconds for which its queues were evicted since it started, on the GPU where that was
        longest. Raises ConfigError where the driver does not count them."""
        counters = sorted((self._root / "proc" / str(self.pid)).glob("stats_*/evicted_ms"))
        if not counters:
            raise ConfigError(
                "AMD's driver does not count here how long queues are evicted",
                got=f"no stats_*/evicted_ms in {self._root / 'proc' / str(self.pid)}",
                expected="one a GPU",
                remedy="Use a driver that has it: Linux 5.10 or later, or ROCm's own amdgpu-dkms.",
            )
        return max(int(counter.read_text()) for counter in counters)

    def check_alone(self) -> None:
        """Raise ConfigError where another process has queues on a GPU on which this one has some."""
        ours = _gpus_of(self.pid, self._root)
        others = [pid for pid in sorted(processes(self._root) - {self.pid}) if ours & _gpus_of(pid, self._root)]
        if others:
            raise ConfigError(
                "others use this GPU too: what they do would look like a stall",
                got=f"queues of process {', '.join(map(str, others))} (the host's pids) on the GPU",
                expected="an idle GPU",
                remedy="End them, or choose another GPU with --device.",
            )


def _gpus_of(pid: int, root: Path) -> set[str]:
    """Return the GPUs on which a process has queues; nothing for one that has ended meanwhile."""
    return {text_of(path).strip() for path in (root / "proc" / str(pid)).glob("queues/*/gpuid")} - {""}
