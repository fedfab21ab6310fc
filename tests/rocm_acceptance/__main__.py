"""scripts/rocm-acceptance: measure kvhoist on this machine's AMD GPU, and write FILE.json and FILE.html.

Parts run one after the other, each in a process of its own with a deadline; one that crashes or hangs is named, and the
others run. The exit status is 0 where no part failed, 1 where one did. HIP_VISIBLE_DEVICES chooses the GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvhoist.bench.facts import facts
from rocm_acceptance import runner
from rocm_acceptance.parts import PARTS, Part
from rocm_acceptance.report import page
from rocm_acceptance.speeds import published

_SIMULATED_DEADLINE_S = 120
_BY_WEIGHT = (runner.FAILED, runner.PASSED, runner.SKIPPED)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that `argv` asks for; return the exit status."""
    asked = _parser().parse_args(argv)
    chosen = [part for part in PARTS if part.name in (asked.only or [part.name])]
    folder = asked.output.absolute().parent
    if not folder.is_dir():
        _parser().error(f"--output: there is no folder {folder}")
    found = []
    with tempfile.TemporaryDirectory(prefix="kvhoist-acceptance-") as name:
        simulator = _simulator(Path(name)) if asked.simulate else None
        for part in chosen:
            print(f"{part.title} ...", flush=True)
            found.append(_run(part, Path(name), simulator))
            print(f"    {found[-1]['status']} in {found[-1]['seconds']} s. {found[-1]['reason']}".rstrip(), flush=True)
    result = {
        "acceptance": "rocm",
        "simulated": asked.simulate,
        "status": next(s for s in _BY_WEIGHT if any(part["status"] == s for part in found)),
        **facts(),
        "parts": found,
        "published": published(),
    }
    _write(result, asked.output)
    print(f"{'SIMULATED, no GPU was measured: ' if asked.simulate else ''}{_summary(found)}")
    return 1 if result["status"] == runner.FAILED else 0


def _run(part: Part, folder: Path, simulator: Path | None) -> dict[str, Any]:
    file = folder / f"{part.name}.jsonl"
    command = [sys.executable, "-m", "rocm_acceptance.child", part.name, str(file)]
    answer = runner.run_process(
        [*command, str(simulator)] if simulator else command,
        file,
        deadline_s=_SIMULATED_DEADLINE_S if simulator else part.deadline_s,
        environment={"KVHOIST_PLATFORM": "rocm", **part.environment},
    )
    return {"name": part.name, "title": part.title, **answer}


def _simulator(folder: Path) -> Path:
    import hip_simulator

    hip_simulator.build(folder)
    return folder


def _write(result: dict[str, Any], output: Path) -> None:
    for suffix, text in ((".json", json.dumps(result, indent=1) + "\n"), (".html", page(result))):
        path = output.with_name(output.name + suffix)
        path.write_text(text)
        print(f"wrote {path}")


def _summary(parts: Sequence[dict[str, Any]]) -> str:
    by_status = {s: [part["name"] for part in parts if part["status"] == s] for s in _BY_WEIGHT}
    return "; ".join(f"{status}: {', '.join(names)}" for status, names in by_status.items() if names)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "rocm-acceptance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulate", action="store_true", help="on a simulated HIP runtime, to see that it runs")
    parser.add_argument(
        "--only", action="append", choices=[part.name for part in PARTS], help="this part; may be given again"
    )
    parser.add_argument("--output", type=Path, default=Path("rocm-acceptance"), metavar="FILE", help="without suffix")
    return parser


if __name__ == "__main__":
    sys.exit(main())
