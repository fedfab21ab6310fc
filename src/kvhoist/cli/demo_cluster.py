"""`kvhoist demo-cluster`: two vLLM servers share one cache over Mooncake, one prefills and the other decodes."""

from __future__ import annotations

import ctypes
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

import typer
from rich.box import SIMPLE
from rich.table import Table

from kvhoist.cli.output import JsonOption, console, print_json, side_console
from kvhoist.cli.vllm_demos import DtypeOption, ModelOption, Stage, check_demo, on_stage
from kvhoist.errors import MissingDependencyError

if TYPE_CHECKING:
    from kvhoist.demo.cluster_result import ClusterResult, ClusterRow

_COLUMNS = ("B answers", "prompt", "device", "host", "store", "prefill", "TTFT", "recomputing", "ratio", "identical")
_NUM_STEPS = 17

_HOW_TO_GET_IT = (
    "Run scripts/demo-cluster, which sets up vLLM's CPU build and Mooncake, or install kvhoist where your vLLM is "
    "(pip install . in a clone) and mooncake-transfer-engine (without CUDA: mooncake-transfer-engine-non-cuda)."
)


def demo_cluster(model: ModelOption = None, dtype: DtypeOption = "auto", as_json: JsonOption = False) -> None:
    """Two vLLM servers on 127.0.0.1 and 127.0.0.2 with one cache: A only persists, B only loads, and both may fail.

    B loads what A computed, also from A's prefill at once (a router sends each request to A for one token, then to B);
    the master of the cluster is killed and comes back; A is killed. Answers of B are compared, to the bit of each log
    probability, with those of A alone. Exit code 1: something differed, or was not loaded.
    """
    check_demo(dtype, "mooncake", remedy=_HOW_TO_GET_IT)
    _check_verbs()
    with redirect_stdout(sys.stderr):  # results alone go to stdout
        result = on_stage(model, dtype, _NUM_STEPS, _play)
    _show(result, as_json=as_json)
    if as_json:
        print_json(result.to_dict())
    raise typer.Exit(1 if result.problems else 0)


def _check_verbs() -> None:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        raise MissingDependencyError(
            "a library that Mooncake needs is not installed",
            got=str(error),
            expected="libibverbs.so.1",
            remedy="Debian: apt-get install libibverbs1 (scripts/demo-cluster does that where it runs as root).",
        ) from error


def _play(stage: Stage) -> ClusterResult:
    from kvhoist.demo.cluster_session import ClusterOptions, play

    options = ClusterOptions(model=stage.model, logs=stage.cache_dir / "demo-cluster", dtype=stage.dtype)
    return play(options, on_step=stage.on_step, on_row=lambda row: stage.say(_line(row)))


def _line(row: ClusterRow) -> str:
    return f"{row.what}: first token in {row.ttft_seconds:.2f} s, {row.ttft_recomputed_seconds:.2f} s recomputing"


def _show(result: ClusterResult, *, as_json: bool) -> None:
    table = Table(box=SIMPLE, padding=(0, 1), show_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == _COLUMNS[0] else "right")
    for row in result.rows:
        table.add_row(*_cells(row))
    out = side_console() if as_json else console()
    out.print(table)
    out.print(
        "device, host, store: tokens that B found there. prefill: what A took before. recomputing: B's TTFT where it "
        "finds nothing.\nidentical: equal to the bit to A alone, whose device kept the prefix."
    )
    for name, pages in result.pages.items():
        out.print(f"Pages that {name} moved: {', '.join(f'{kind} {number:,}' for kind, number in pages.items())}.")
    if result.recovery_seconds is not None:
        out.print(f"B loaded again {result.recovery_seconds} s after the master was back.")
    for problem in result.problems:
        out.print(f"WRONG: {problem}")


def _cells(row: ClusterRow) -> list[str]:
    tokens = (row.prompt_tokens, row.device_tokens, row.host_tokens, row.stored_tokens)
    return [
        row.what,
        *(f"{number:,}" if number else "-" for number in tokens),
        f"{row.prefill_seconds:.2f} s" if row.prefill_seconds else "-",
        f"{row.ttft_seconds:.2f} s",
        f"{row.ttft_recomputed_seconds:.2f} s",
        f"{row.ttft_ratio:.2f}",
        "yes" if row.problem is None else "NO",
    ]
