"""`kvhoist demo`: a real chat whose KV cache lives in device, host and disk tiers, judged against recomputing."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.table import Table

from kvhoist.bench.plot import check_plot
from kvhoist.cli.output import JsonOption, PlotOption, console, print_json, progress_bar, side_console
from kvhoist.demo.plot import plot_turns
from kvhoist.errors import ConfigError
from kvhoist.settings import Settings, user_path
from kvhoist.units import parse_bytes

if TYPE_CHECKING:
    from kvhoist.demo.session import Turn
    from kvhoist.demo.whole import DemoResult

_COLUMNS = ("turn", "prompt", "device", "host", "disk", "recomputed", "TTFT with", "without", "faster", "kept", "text")


def demo(
    model: Annotated[
        str | None, typer.Option("--model", help="Model folder or hub name; default: the packaged SmolLM2.")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32 or bfloat16; in bfloat16 oracle (a) decides.")
    ] = "float32",
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Empty or new folder for the store, kept; default: one that is removed."),
    ] = None,
    host_bytes: Annotated[str, typer.Option("--host-bytes", help="The host tier.")] = "200MiB",
    device_tokens: Annotated[int, typer.Option("--device-tokens", min=1, help="The device pool, in tokens.")] = 2560,
    page_tokens: Annotated[int, typer.Option("--page-tokens", min=1, help="Tokens a page.")] = 32,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Tokens an answer.")] = 16,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Several long conversations on a device pool too small for them, and one more turn after a restart.

    Every answer is compared with (a) the same computation on a prefix that was simply kept in memory, logits and KV to
    the bit, and (b) recomputing everything, token by token. Exit code 1: something differed.
    """
    num_host_bytes = parse_bytes(host_bytes, name="--host-bytes")
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError("unknown --dtype", got=dtype, choices=["float32", "bfloat16"])
    if plot is not None:
        check_plot(plot)
    with store_folder(folder) as place, redirect_stdout(sys.stderr):  # results alone go to stdout
        result = _run(model, dtype, place, num_host_bytes, device_tokens, page_tokens, new_tokens)
    if plot is not None:
        plot_turns(result.turns, result.restarted, plot, f"{Path(result.options.model).name}, {dtype}")
    _show(result, as_json=as_json)
    if as_json:
        print_json(result.to_dict())
    raise typer.Exit(0 if result.identical else 1)


def _run(
    model: str | None, dtype: str, folder: Path, host_bytes: int, device_tokens: int, page_tokens: int, new_tokens: int
) -> DemoResult:
    with progress_bar() as bar:
        task = bar.add_task("starting", total=None)
        from kvhoist.adapters.transformers.loading import quiet_transformers
        from kvhoist.demo.packaged_model import packaged_model
        from kvhoist.demo.session import DemoOptions
        from kvhoist.demo.whole import NUM_STEPS, run_demo

        quiet_transformers()
        if model is None:
            model = str(
                packaged_model(
                    Settings.from_env().cache_dir,
                    lambda what, done, steps: bar.update(task, description=what, completed=done, total=steps),
                )
            )
        options = DemoOptions(
            model=model,
            folder=folder,
            dtype=dtype,
            device_tokens=device_tokens,
            host_bytes=host_bytes,
            page_tokens=page_tokens,
            new_tokens=new_tokens,
        )
        bar.reset(task, total=NUM_STEPS)
        return run_demo(
            options,
            on_step=lambda what: bar.update(task, description=what, advance=1),
            on_turn=lambda turn: bar.console.print(_line(turn), highlight=False),
        )


@contextmanager
def store_folder(chosen: Path | None) -> Iterator[Path]:
    """Give the folder of the store: the user's, which must hold no pages of an earlier run, or one that is removed."""
    if chosen is not None:
        folder = user_path(chosen).absolute()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                "the demo begins with an empty store, so that its first turns are misses",
                got=f"{folder}, which is not empty",
                remedy="Name a new folder, or remove this one.",
            )
        yield folder
        return
    cache_dir = Settings.from_env().cache_dir
    cache_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=cache_dir))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _line(turn: Turn) -> str:
    return (
        f"{turn.who} {turn.number}: first token in {turn.ttft_seconds:.2f} s, {turn.ttft_without_seconds:.2f} s without"
    )


def _show(result: DemoResult, *, as_json: bool) -> None:
    table = Table(box=SIMPLE, padding=(0, 1), show_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "turn" else "right")
    for turn in result.turns:
        table.add_row(*_cells(turn))
    table.add_section()
    table.add_row(*_cells(result.restarted))
    host, disk = result.ttft_speedup_host, result.ttft_speedup_disk
    out = side_console() if as_json else console()
    out.print(table)
    out.print(f"The last row is a new process on the same folder, {result.restarted.disk_tokens} tokens from disk.")
    from_host = f"{host}x (median)" if host else "(no turn was served by it)"
    out.print(f"First token sooner by: host tier {from_host}, disk after the restart {disk}x.")
    out.print(
        f"kept: logits and KV equal to the bit to a prefix kept in memory: {_word(result.same_as_kept)}; "
        f"text: equal to recomputing everything: {_word(result.same_text)}."
    )


def _cells(turn: Turn) -> list[str]:
    tokens = (turn.prompt_tokens, turn.device_tokens, turn.host_tokens, turn.disk_tokens, turn.recomputed_tokens)
    return [
        f"{turn.who} {turn.number}",
        *(f"{number:,}" if number else "-" for number in tokens),
        f"{turn.ttft_seconds:.2f} s",
        f"{turn.ttft_without_seconds:.2f} s",
        f"{turn.speedup:.1f}x",
        _word(turn.same_as_kept),
        _word(turn.same_text),
    ]


def _word(same: bool) -> str:
    return "yes" if same else "NO"
