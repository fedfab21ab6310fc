"""Storage, in parts: FileStore's speed beside fio's; by O_DIRECT and without; an engine's calls while storage is busy,
and while it fails.

python -m kvhoist.bench.storage [--smoke] [--part PART] [FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvhoist.bench import storage_direct, storage_faults, storage_match, storage_speed
from kvhoist.bench.facts import facts
from kvhoist.errors import ConfigError
from kvhoist.system_files import text_of

PARTS = ("speed", "direct", "match", "faults")
ALL = "all"


def run(
    folder: str | os.PathLike[str] | None = None,
    num_pages: int = storage_speed.REINDEX_PAGES,
    page_bytes: Sequence[int] = (),
    smoke: bool = False,
    part: str = ALL,
) -> dict[str, Any]:
    """Measure in a new folder inside of `folder` (default: the temporary folder), which is deleted afterwards: all
    parts, or the one of PARTS that is named. What each part says stands with its `measure`; `page_bytes` and
    `num_pages` are those of `speed`. Raises ConfigError for another part.
    """
    if part not in (*PARTS, ALL):
        raise ConfigError("unknown --part", got=part, choices=(*PARTS, ALL))
    with tempfile.TemporaryDirectory(prefix="kvhoist-bench-", dir=folder) as name:
        scratch = Path(name)
        found: dict[str, Any] = {"disk": _disk_of(scratch)}
        passed = []
        if part in ("speed", ALL):
            found |= storage_speed.measure(scratch, num_pages, page_bytes, smoke)
            passed.append(found["pass"])
        if part in ("direct", ALL):
            found["direct"] = storage_direct.measure(scratch, smoke)
        if part in ("match", ALL):
            found["match"] = storage_match.measure(scratch, smoke)
            passed.append(all(row.get("pass", True) for row in found["match"]))
        if part in ("faults", ALL):
            found |= storage_faults.measure(scratch, smoke)
            passed.append(all(row["pass"] for row in (*found["fault_calls"], *found["faults"])))
    return {"bench": "storage", "smoke": smoke, **facts(), **found, "pass": all(passed)}


def _disk_of(folder: Path) -> str:
    mounts = [line.split() for line in text_of("/proc/mounts").splitlines()]
    inside = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    device, _, kind = max(inside, key=lambda mount: len(mount[1]))[:3] if inside else ("?", "?", "?")
    return f"{device} ({kind})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvhoist.bench.storage", description=__doc__)
    parser.add_argument("folder", nargs="?", help="measure on the disk that holds this folder")
    parser.add_argument("--part", choices=(*PARTS, ALL), default=ALL, help="what to measure")
    parser.add_argument("--smoke", action="store_true", help="a quick run on little data")
    args = parser.parse_args()
    print(json.dumps(run(args.folder, smoke=args.smoke, part=args.part), indent=1))


if __name__ == "__main__":
    main()
