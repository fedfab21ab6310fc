"""The memory nodes of this machine, and whether pages may be moved between them."""

from __future__ import annotations

import errno
import mmap
import re
from pathlib import Path

import numpy as np

from kvhoist.errors import ConfigError
from kvhoist.platform.base import region_of
from kvhoist.platform.page_moves import answer_name, move_pages
from kvhoist.private_memory import private_memory

_NODES = Path("/sys/devices/system/node/has_memory")
_STATUS = Path("/proc/self/status")

_REMEDIES = {
    errno.EPERM: "Allow the system call move_pages; in a container: docker run --cap-add SYS_NICE.",
    errno.EACCES: "Let the cpuset have the memory of two nodes; in a container: docker run --cpuset-mems 0,1.",
    errno.ENOMEM: "Free memory on that node.",
    errno.ENOSYS: "Use a kernel with CONFIG_MIGRATION and CONFIG_NUMA.",
}


def memory_nodes(nodes: Path = _NODES, status: Path = _STATUS) -> tuple[int, ...]:
    """Return the nodes that have memory which this process may use, at least two. Raises ConfigError otherwise."""
    try:
        there = _numbers(nodes.read_text())
    except OSError:  # a kernel without NUMA
        there = {0}
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)", status.read_text(), re.MULTILINE)
    usable = there & _numbers(allowed[1]) if allowed else there
    if len(usable) < 2:
        raise ConfigError(
            "pages cannot be moved to another memory node",
            got=f"memory on {_named(there)}, of which this process may use {_named(usable)}",
            expected="two nodes at least",
            remedy=_REMEDIES[errno.EACCES] if len(there) > 1 else "Run it on a machine with two, or with --simulate.",
        )
    return tuple(sorted(usable))


def check_moves(nodes: tuple[int, ...]) -> None:
    """Move a page from node to node. Raises ConfigError that says what the kernel has against it, and the remedy."""
    with private_memory(mmap.PAGESIZE) as page:
        page[0] = 1
        address = region_of(np.frombuffer(page, np.uint8)).address
        for node in nodes:
            try:
                (answer,) = move_pages([address], node)
            except OSError as error:
                answer = -(error.errno or errno.EIO)
            if answer != node:
                raise ConfigError(
                    f"the kernel moves no page of this process to memory node {node}",
                    got=f"{answer_name(answer)} from move_pages",
                    expected=f"node {node}",
                    remedy=_REMEDIES.get(-answer),
                )


def _numbers(text: str) -> set[int]:
    """Read a kernel's list: "0-1,3"."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}


def _named(nodes: set[int]) -> str:
    return f"node {', '.join(map(str, sorted(nodes)))}" if nodes else "no node"
