"""`kvhoist demo-vllm`: a chat with a vLLM server whose prefixes are evicted, and loaded again instead of recomputed."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.table import Table

from kvhoist.cli.demo import store_folder
from kvhoist.cli.output import JsonOption, console, print_json, side_console
from kvhoist.cli.vllm_demos import DtypeOption, ModelOption, Stage, check_demo, on_stage
from kvhoist.units import parse_bytes

if TYPE_CHECKING:
    from kvhoist.demo.vllm_session import VllmDemoResult, VllmTurn

_COLUMNS = ("turn", "prompt", "cached", "device", "host", "disk", "TTFT with", "recomputing", "ratio", "identical")
_STEPS = 3 + 4 * 3 + 3 * 2
"""Servers, questions, other conversations."""

_HOW_TO_GET_IT = (
    "Run scripts/demo-vllm, which sets up vLLM's CPU build, or install kvhoist where your vLLM is: pip install . in a "
    "clone."
)


def demo_vllm(
    model: ModelOption = None,
    dtype: DtypeOption = "auto",
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Empty or new folder for the store, kept; default: one that is removed."),
    ] = None,
    host_bytes: Annotated[str, typer.Option("--host-bytes", help="The host tier.")] = "1GiB",
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, max=64, help="Tokens an answer.")] = 16,
    as_json: JsonOption = False,
) -> None:
    """A vLLM server with kvhoist, a chat whose prefix other conversations push out of the device, and a restart.

    Answers are compared, to the bit of each log probability, with those of a second server that kept the prefix in
    its device cache. Exit code 1: something differed.
    """
    num_host_bytes = parse_bytes(host_bytes, name="--host-bytes")
    check_demo(dtype, remedy=_HOW_TO_GET_IT)
    with store_folder(folder) as place, redirect_stdout(sys.stderr):  # results alone go to stdout
        result = on_stage(model, dtype, _STEPS, lambda stage: _play(stage, place, num_host_bytes, new_tokens))
    _show(result, as_json=as_json)
    if as_json:
        print_json(result.to_dict())
    raise typer.Exit(0 if result.identical else 1)


def _play(stage: Stage, folder: Path, host_bytes: int, new_tokens: int) -> VllmDemoResult:
    from kvhoist.demo.vllm_session import VllmDemoOptions, VllmSession

    options = VllmDemoOptions(
        model=stage.model,
        folder=folder,
        logs=stage.cache_dir / "demo-vllm",
        dtype=stage.dtype,
        host_bytes=host_bytes,
        new_tokens=new_tokens,
    )
    return VllmSession(options, on_step=stage.on_step, on_turn=lambda turn: stage.say(_line(turn))).play()


def _line(turn: VllmTurn) -> str:
    return (
        f"question {turn.number}: first token in {turn.ttft_seconds:.2f} s, "
        f"{turn.ttft_recomputed_seconds:.2f} s recomputing"
    )


def _show(result: VllmDemoResult, *, as_json: bool) -> None:
    table = Table(box=SIMPLE, padding=(0, 1), show_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for turn in result.turns:
        if turn.after_restart:
            table.add_section()
        table.add_row(*_cells(turn))
    out = side_console() if as_json else console()
    out.print(table)
    out.print("The last row is a new server on the same folder, its host tier empty.")
    out.print(
        "identical: tokens and log probabilities equal to the bit to a server that kept the prefix on the device: "
        f"{_word(result.identical)}."
    )
    out.print(f"Time to first token of turns 2 to {len(result.turns)}: at most {result.ttft_ratio:.2f} of recomputing.")
    for turn in result.turns:
        if turn.difference is not None:
            out.print(f"question {turn.number} differs: {turn.difference}")


def _cells(turn: VllmTurn) -> list[str]:
    tokens = (turn.prompt_tokens, turn.cached_tokens, turn.device_tokens, turn.host_tokens, turn.disk_tokens)
    return [
        str(turn.number),
        *(f"{number:,}" if number else "-" for number in tokens),
        f"{turn.ttft_seconds:.2f} s",
        f"{turn.ttft_recomputed_seconds:.2f} s",
        f"{turn.ttft_ratio:.2f}",
        _word(turn.identical),
    ]


def _word(same: bool) -> str:
    return "yes" if same else "NO"
