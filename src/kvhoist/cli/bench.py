"""`kvhoist bench`: what the benchmarks of kvhoist.bench measure on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvhoist.cli.acceptance import vllm_acceptance
from kvhoist.cli.output import JsonOption, console, print_json, tables_of, working
from kvhoist.errors import ConfigError
from kvhoist.platform.base import CPU, Device

bench_app = typer.Typer(
    name="bench", help="Measure this machine: medians, ratios, both arms in one run.", no_args_is_help=True
)

SmokeOption = Annotated[bool, typer.Option("--smoke", help="A few seconds, to see that it runs; figures mean nothing.")]


@bench_app.command()
def directory(
    pages: Annotated[int, typer.Option(min=1000, help="Pages in the directory.")] = 1_000_000,
    smoke: SmokeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Match, pin, insert and evict in a directory of a million pages; hashing beside it."""
    from kvhoist.bench.directory import run

    with working("measuring the directory (some minutes)", as_json=as_json):
        result = run(num_pages=pages, smoke=smoke)
    _show(result, as_json)


@bench_app.command()
def storage(
    folder: Annotated[Path | None, typer.Option(help="On the disk to measure; default: the temporary folder.")] = None,
    pages: Annotated[int, typer.Option(min=1, help="Pages to find again at start.")] = 100_000,
    smoke: SmokeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write and read pages in a FileStore, beside plain sequential I/O on the same disk."""
    from kvhoist.bench.storage import run

    if folder is not None and not folder.is_dir():
        raise ConfigError("--folder is no folder", got=str(folder), expected="a folder on the disk to measure")
    with working("measuring storage (some minutes)", as_json=as_json):
        result = run(folder, num_pages=pages, smoke=smoke)
    _show(result, as_json)


@bench_app.command()
def copy(
    device: Annotated[str, typer.Option(help="cpu, or a GPU: cuda, cuda:1.")] = "cpu",
    smoke: SmokeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy scattered pages between device layouts and host pages, beside one plain copy of as many bytes."""
    chosen = _device(device)
    with working("measuring copies", as_json=as_json):
        if chosen == CPU:
            from kvhoist.bench.copy import run

            result = run(smoke=smoke)
        else:
            from kvhoist.bench import copy_device

            result = copy_device.run(chosen, smoke=smoke)
    _show(result, as_json)


@bench_app.command()
def ttft(
    device: Annotated[str | None, typer.Option(help="A GPU: cuda (the default), cuda:1; with --smoke the CPU.")] = None,
    prefix: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a prefix; may be given again. Default: 4k, 16k, 32k.")
    ] = None,
    smoke: SmokeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time to first token of an 8B Llama (random weights) with its prefix in host memory: recomputed, loaded whole,
    loaded layer by layer under the forward."""
    from kvhoist.adapters.transformers.loading import quiet_transformers

    chosen = _device(device or ("cpu" if smoke else "cuda"))
    if chosen == CPU and not smoke:
        raise ConfigError("an 8B model on the CPU takes hours", got="--device cpu", choices=["cuda", "cpu --smoke"])
    quiet_transformers()
    with working("measuring times to first token (a minute or two)", as_json=as_json):
        from kvhoist.bench.ttft import run

        result = run(chosen, prefixes=prefix or (), smoke=smoke)
    _show(result, as_json)


@bench_app.command()
def vllm(
    part: Annotated[str, typer.Option(help="throughput, scheduler, or all.")] = "all",
    model: Annotated[Path | None, typer.Option(help="Model folder; default: the packaged SmolLM2.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds in which the engines take turns.")] = 10,
    smoke: SmokeOption = False,
    as_json: JsonOption = False,
) -> None:
    """What kvhoist costs vLLM where no prompt is reused, and what it costs vLLM's scheduler."""
    from kvhoist.cli.bench_vllm import measure

    _show(measure(part=part, model=model, rounds=rounds, smoke=smoke, as_json=as_json), as_json)


bench_app.command()(vllm_acceptance)


def _device(text: str) -> Device:
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigError("--device is no device", got=repr(text), choices=["cpu", "cuda", "cuda:1"])
    return CPU if kind == "cpu" else Device(kind, int(index or 0))


def _show(result: dict[str, Any], as_json: bool) -> None:
    if result["smoke"]:
        result = _without_verdicts(result)
    if as_json:
        print_json(result)
    else:
        console().print(*tables_of(result), sep="\n")


def _without_verdicts(data: Any) -> Any:
    """Return a smoke run's data less what it says of targets, which only a whole run can tell."""
    if isinstance(data, dict):
        return {key: _without_verdicts(value) for key, value in data.items() if key != "pass"}
    return [_without_verdicts(value) for value in data] if isinstance(data, list) else data
