"""`kvhoist bench vllm-acceptance`: for owners of a GPU and a model, what either kind of offloading is worth to them."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from kvhoist.bench.plot import check_plot
from kvhoist.cli.output import JsonOption, PlotOption, console, print_json, side_console, table_of
from kvhoist.cli.vllm_common import need, tiny_model, told
from kvhoist.demo.vllm_trace import ConversationSizes, Trace, conversations, mooncake
from kvhoist.errors import ConfigError
from kvhoist.settings import user_path
from kvhoist.units import parse_bytes

_SMOKE_SIZES = ConversationSizes(conversations=4, turns=2, prompt_tokens=200, turn_tokens=20, new_tokens=6)
_SMOKE_OPTIONS = {"host_bytes": 64 << 20, "block_tokens": 32, "clients": 2, "dtype": "float32", "device_tokens": None}
_LEFT_OUT = ("what", "counters", "ready_s")


# As long as its options are many.
def vllm_acceptance(
    model: Annotated[str | None, typer.Option(help="Model folder or hub name, as vLLM takes it.")] = None,
    arms: Annotated[str, typer.Option(help="Which arms, in order.")] = "none,native,kvhoist",
    host_bytes: Annotated[str, typer.Option(help="Host memory of each offloading arm.")] = "16GiB",
    storage: Annotated[str | None, typer.Option(help="kvhoist's third tier: file:/path. Default: none.")] = None,
    num_conversations: Annotated[int, typer.Option("--conversations", min=1, help="They interleave.")] = 32,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each conversation.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a first prompt.")] = 4000,
    shared_tokens: Annotated[int, typer.Option(min=0, help="Of these, common to all conversations.")] = 0,
    turn_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a later question.")] = 200,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    clients: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the conversations.")] = 0,
    trace: Annotated[Path | None, typer.Option(help="A trace in Mooncake's format instead of conversations.")] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="How many times as fast that trace is played.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests of it.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longer requests of it are left out.")] = 32768,
    device_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in the device cache. Default: half of what conversations hold at their end."),
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="vLLM's --block-size.")] = 16,
    dtype: Annotated[str, typer.Option(help="vLLM's --dtype.")] = "auto",
    kvhoist: Annotated[str, typer.Option(help="More settings of kvhoist, as JSON.")] = "{}",
    native: Annotated[str, typer.Option(help="More settings of vLLM's own offloading, as JSON.")] = "{}",
    server: Annotated[str, typer.Option(help="More arguments of every server, as one text.")] = "",
    logs: Annotated[Path | None, typer.Option(help="Keep the servers' logs in this folder.")] = None,
    plot: PlotOption = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="A tiny model and trace, on the CPU: does it run?")] = False,
    as_json: JsonOption = False,
) -> None:
    """TTFT, throughput and ITL of three servers under one trace: no offloading, vLLM's own, kvhoist.

    Needs a GPU, a model, vLLM and what it brings, and matplotlib for --plot. Exit code 1: an arm failed that should
    have run.
    """
    need("vllm", "aiohttp", "prometheus_client")
    if plot is not None:
        check_plot(plot)
    chosen = {
        "host_bytes": parse_bytes(host_bytes, name="--host-bytes"),
        "arms": tuple(arm.strip() for arm in arms.split(",")),
        "clients": clients,
        "dtype": dtype,
        "block_tokens": block_tokens,
        "device_tokens": device_tokens,
        "storage": storage,
        "kvhoist": _settings("--kvhoist", kvhoist),
        "native": _settings("--native", native),
        "server": tuple(shlex.split(server)),
    }
    sizes = ConversationSizes(num_conversations, turns, prompt_tokens, shared_tokens, turn_tokens, new_tokens)
    if smoke:
        sizes, chosen = _SMOKE_SIZES, {**chosen, **_SMOKE_OPTIONS}

    def play_of(vocabulary: int) -> Trace:
        if trace is None:
            return conversations(sizes, vocabulary, seed)
        file = user_path(trace)
        return mooncake(file, vocabulary, speed=speed, most_tokens=max_tokens, most_requests=requests)

    result = _compare(model, chosen, play_of, logs, smoke=smoke, as_json=as_json)
    if plot is not None:
        from kvhoist.demo.vllm_acceptance_plot import plot_acceptance

        plot_acceptance(result, plot)
    _show(result, as_json)
    raise typer.Exit(0 if result["pass"] else 1)


def _compare(
    model: str | None, chosen: dict[str, Any], play_of: Any, logs: Path | None, *, smoke: bool, as_json: bool
) -> dict[str, Any]:
    with _folder(logs) as folder, told(as_json=as_json) as on_step:
        from kvhoist.demo.signals import ended_by_signals
        from kvhoist.demo.vllm_acceptance import AcceptanceOptions, has_gpu, run

        on_gpu = has_gpu() and not smoke
        name = _model_of(model, folder, on_gpu=on_gpu, smoke=smoke)
        trace = play_of(_vocabulary(name))
        if chosen["device_tokens"] is None:
            # Half of it, so that prefixes are evicted; but what runs at once must fit.
            chosen["device_tokens"] = max(trace.working_set_tokens // 2, chosen["clients"] * trace.longest_tokens)
        options = AcceptanceOptions(model=name, logs=folder, on_gpu=on_gpu, max_tokens=trace.longest_tokens, **chosen)
        with ended_by_signals():
            return {"bench": "vllm-acceptance", "smoke": smoke, **run(options, trace, on_step)}


def _show(result: dict[str, Any], as_json: bool) -> None:
    out = side_console() if as_json else console()
    ran = {name: arm for name, arm in result["arms"].items() if "not_run" not in arm}
    if ran:
        rows = [{"arm": name, **{k: v for k, v in arm.items() if k not in _LEFT_OUT}} for name, arm in ran.items()]
        out.print(table_of("", rows))
    for name, arm in result["arms"].items():
        if "not_run" in arm:
            out.print(Text.assemble((f"{name}: not run: ", "bold"), arm["not_run"]))
            out.print(Text("\n".join(f"    {line}" for line in arm["log_tail"]), style="dim"))
    for name, arm in list(ran.items())[1:]:
        out.print(f"{name}: {arm['answers_as_first_arm']:.1%} of its answers are those of {next(iter(ran))!r}.")
    if any(arm["answers_as_first_arm"] < 1 for arm in ran.values()):
        out.print(result["why_answers_may_differ"])
    if as_json:
        print_json(result)


def _model_of(model: str | None, folder: Path, *, on_gpu: bool, smoke: bool) -> str:
    if smoke:
        return model or str(tiny_model(folder))
    if not on_gpu:
        raise ConfigError(
            "no GPU was found",
            expected="a GPU that torch sees",
            remedy="To try the comparison itself, on the CPU and a tiny model: --smoke.",
        )
    if model is None:
        raise ConfigError("which model is to be served", expected="--model with a folder or a hub name")
    return model


def _vocabulary(model: str) -> int:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError("the model's config cannot be read", got=f"{model}: {error}") from error
    return int(config.get_text_config().vocab_size)


def _settings(option: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} is no JSON", got=f"{text!r}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{option} is no JSON object", got=repr(text))
    return found


@contextmanager
def _folder(chosen: Path | None) -> Iterator[Path]:
    if chosen is not None:
        folder = user_path(chosen).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="kvhoist-acceptance-") as scratch:
        yield Path(scratch)
