"""`kvhoist bench`: what the benchmarks of kvhoist.bench measure on this machine."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvhoist.bench.kfd import HostPid
from kvhoist.bench.plot import check_plot
from kvhoist.bench.plot import plot as plot_result
from kvhoist.cli.acceptance import vllm_acceptance
from kvhoist.cli.output import JsonOption, PlotOption, console, print_json, side_console, tables_of, working
from kvhoist.errors import ConfigError
from kvhoist.platform.base import CPU, Device

bench_app = typer.Typer(
    name="bench", help="Measure this machine: medians, ratios, both arms in one run.", no_args_is_help=True
)

SmokeOption = Annotated[bool, typer.Option("--smoke", help="A few seconds, to see that it runs; figures mean nothing.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, or a GPU, AMD's too: cuda, cuda:1.")]


@bench_app.command()
def directory(
    pages: Annotated[int, typer.Option(min=1000, help="Pages in the directory.")] = 1_000_000,
    plot: PlotOption = None,
    smoke: SmokeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Match, pin, insert and evict in a directory of a million pages; hashing beside it."""
    from kvhoist.bench.directory import run

    with _measuring("the directory (some minutes)", plot, as_json):
        result = run(num_pages=pages, smoke=smoke)
    _show(result, as_json, plot)


@bench_app.command()
def storage(
    folder: Annotated[Path | None, typer.Option(help="On the disk to measure; default: the temporary folder.")] = None,
    pages: Annotated[int, typer.Option(min=1, help="Pages to find again at start.")] = 100_000,
    part: Annotated[str, typer.Option(help="speed, direct, match, faults, or all.")] = "all",
    plot: PlotOption = None,
    smoke: SmokeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write and read pages in a FileStore, beside fio on the same disk (apt-get install fio); then an engine's calls
    while storage is busy, and while it fails."""
    from kvhoist.bench.storage import run

    if plot is not None and part not in ("speed", "all"):
        raise ConfigError("--plot draws the speed", got=f"--part {part}", choices=["speed", "all"])
    if folder is not None and not folder.is_dir():
        raise ConfigError("--folder is no folder", got=str(folder), expected="a folder on the disk to measure")
    with _measuring("storage (some minutes)", plot, as_json):
        result = run(folder, num_pages=pages, smoke=smoke, part=part)
    _show(result, as_json, plot)


@bench_app.command()
def mooncake(smoke: SmokeOption = False, as_json: JsonOption = False) -> None:
    """Put and get pages in a Mooncake Store on this machine's loopback, beside its own client's batch calls."""
    from kvhoist.bench.mooncake import run

    with _measuring("Mooncake (some minutes)", None, as_json):
        result = run(smoke)
    _show(result, as_json)


@bench_app.command()
def copy(
    device: DeviceOption = "cpu",
    also: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE:FUNCTION", help="On a GPU: makes another's engine from a Between."),
    ] = None,
    plot: PlotOption = None,
    smoke: SmokeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy scattered pages between device layouts and host pages, beside one plain copy of as many bytes."""
    place = _device_of(device)
    with _measuring("copies", plot, as_json):
        if place.type == CPU.type:
            from kvhoist.bench.copy import run

            result = run(smoke=smoke)
        else:
            from kvhoist.bench import copy_device

            result = copy_device.run(place, smoke=smoke, also=also or ())
    _show(result, as_json, plot)


@bench_app.command()
def alloc(
    device: DeviceOption = "cpu",
    gib: Annotated[
        list[int] | None,
        typer.Option(min=1, help="GiB to make; may be given several times. Default: 1, 8 and 32; on the CPU 1."),
    ] = None,
    plot: PlotOption = None,
    smoke: SmokeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make pinned host memory and give it back, beside torch's; without a GPU, plain memory beside numpy's."""
    what = "host memory (some minutes)"
    _measure("alloc", what, _device_of(device), plot, as_json, gib=gib or (), smoke=smoke)


@bench_app.command()
def cold(
    device: DeviceOption = "cpu", plot: PlotOption = None, smoke: SmokeOption = False, as_json: JsonOption = False
) -> None:
    """Time the first transfer of a fresh process, without and with a compiled kernel in the cache folder."""
    _measure("cold", "first transfers", _device_of(device), plot, as_json, smoke=smoke)


@bench_app.command()
def duplex(
    device: DeviceOption = "cpu", plot: PlotOption = None, smoke: SmokeOption = False, as_json: JsonOption = False
) -> None:
    """Load and offload at once, beside two plain copies that cross the link at once."""
    _measure("duplex", "both directions at once", _device_of(device), plot, as_json, smoke=smoke)


@bench_app.command()
def interference(
    device: DeviceOption = "cpu", plot: PlotOption = None, smoke: SmokeOption = False, as_json: JsonOption = False
) -> None:
    """How much copies slow kernels like a model's, beside what one plain copy costs them. A GPU needs torch."""
    _measure("interference", "copies beside compute (a minute or two)", _device_of(device), plot, as_json, smoke=smoke)


@bench_app.command()
def migration(
    device: Annotated[str, typer.Option(help="An AMD GPU: cuda, cuda:1 (as torch calls it).")] = "cuda",
    gib: Annotated[int, typer.Option(min=1, help="GiB of the host tier: what the driver must map anew.")] = 16,
    host_pid: Annotated[
        HostPid, typer.Option(help="How an arm's pid on the host is known; ask: a line of stdin for each arm.")
    ] = HostPid.FIND,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Without a GPU: see that it runs, on stand-ins. Measures nothing.")
    ] = False,
    plot: PlotOption = None,
    smoke: SmokeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Stalls when the kernel migrates pages of the host tier on ROCm: registered memory beside the driver's (GTT)."""
    options = {"gib": gib, "host_pid": host_pid, "simulate": simulate, "smoke": smoke}
    what = "nothing: a simulated run" if simulate else "page migration (a minute or more)"
    if host_pid is HostPid.ASK:
        side_console().print("each arm waits for its pid on the host, on a line of stdin (process migration_child)")
    _measure("migration", what, _device_of(device), plot, as_json, **options)


@bench_app.command()
def submit(
    device: DeviceOption = "cpu", plot: PlotOption = None, smoke: SmokeOption = False, as_json: JsonOption = False
) -> None:
    """CPU time to begin copies of 64 pages, by every engine and by what is chosen."""
    _measure("submit", "submitting", _device_of(device), plot, as_json, smoke=smoke)


@bench_app.command()
def ttft(
    device: Annotated[str | None, typer.Option(help="A GPU: cuda (the default), cuda:1; with --smoke the CPU.")] = None,
    prefix: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a prefix; may be given again. Default: 4k, 16k, 32k.")
    ] = None,
    attention: Annotated[str, typer.Option(help="An attention implementation of transformers.")] = "kvhoist_sdpa",
    plot: PlotOption = None,
    smoke: SmokeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time to first token of an 8B Llama (random weights) with its prefix in host memory: recomputed, loaded whole,
    loaded layer by layer under the forward."""
    from kvhoist.adapters.transformers.loading import quiet_transformers

    place = _device_of(device or ("cpu" if smoke else "cuda"))
    if place == CPU and not smoke:
        raise ConfigError("an 8B model on the CPU takes hours", got="--device cpu", choices=["cuda", "cpu --smoke"])
    quiet_transformers()
    what = "times to first token (a minute or two)"
    _measure("ttft", what, place, plot, as_json, prefixes=prefix or (), attention=attention, smoke=smoke)


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


def _device_of(text: str) -> Device:
    kind, _, index = text.partition(":")
    if kind not in (CPU.type, "cuda") or (index and not index.isdigit()):
        raise ConfigError("--device is no device", got=repr(text), choices=["cpu", "cuda", "cuda:1"])
    return Device(kind, int(index or 0))


def _measure(bench: str, what: str, place: Device, plot_path: Path | None, as_json: bool, **options: Any) -> None:
    """Run a benchmark of `kvhoist.bench` on a device, and show its result."""
    with _measuring(what, plot_path, as_json):
        result = importlib.import_module(f"kvhoist.bench.{bench}").run(place, **options)
    _show(result, as_json, plot_path)


@contextmanager
def _measuring(what: str, plot_path: Path | None, as_json: bool) -> Iterator[None]:
    """Refuse a picture that cannot be drawn, then show what is being measured."""
    if plot_path is not None:
        check_plot(plot_path)
    with working(f"measuring {what}", as_json=as_json):
        yield


def _show(result: dict[str, Any], as_json: bool, plot_path: Path | None = None) -> None:
    if result["smoke"]:
        result = _without_verdicts(result)
    if plot_path is not None:
        plot_result(result, plot_path)
    if as_json:
        print_json(result)
    else:
        console().print(*tables_of(result), sep="\n")


def _without_verdicts(data: Any) -> Any:
    """Return a smoke run's data less what it says of targets, which only a whole run can tell."""
    if isinstance(data, dict):
        return {key: _without_verdicts(value) for key, value in data.items() if key != "pass"}
    return [_without_verdicts(value) for value in data] if isinstance(data, list) else data
