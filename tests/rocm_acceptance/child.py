"""One part in a process of its own: python -m rocm_acceptance.child PART FILE [SIMULATOR].

Writes a line of JSON to FILE for each row as soon as it is known, so that what comes before a crash is kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rocm_acceptance.parts import PARTS
from rocm_acceptance.target import Target


def main() -> None:
    name, file, *simulator = sys.argv[1:]
    part = next(part for part in PARTS if part.name == name)
    target = Target(Path(simulator[0]) if simulator else None)
    if part.on_gpu:
        target.load()
    with Path(file).open("w") as rows:
        for row in part.run(target):
            rows.write(json.dumps(row) + "\n")
            rows.flush()
        for row in target.accesses() if part.on_gpu else ():
            rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
