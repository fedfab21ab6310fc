"""What the demos with vLLM servers share: their options, what must be there, and the frame in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.text import Text

from kvhoist.cli.output import progress_bar
from kvhoist.cli.vllm_common import OnStep, need, smollm2
from kvhoist.errors import ConfigError
from kvhoist.settings import Settings, user_path

ModelOption = Annotated[Path | None, typer.Option("--model", help="Model folder; default: the packaged SmolLM2.")]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="float32 or bfloat16; default: bfloat16 where this machine is fast in it.")
]

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Stage:
    """What a demo plays with: a model's folder, a dtype, a folder for logs, and how a person hears of it."""

    model: Path
    dtype: str
    cache_dir: Path
    on_step: OnStep
    say: OnStep


def check_demo(dtype: str, *modules: str, remedy: str) -> None:
    """Raise ConfigError or MissingDependencyError where a demo that needs `modules` cannot run."""
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ConfigError("unknown --dtype", got=dtype, choices=["auto", "float32", "bfloat16"])
    need("vllm", "openai", "prometheus_client", *modules, remedy=remedy)
    if Settings.from_env().disabled:
        raise ConfigError("kvhoist is turned off here", got="KVHOIST_DISABLE", remedy="Unset KVHOIST_DISABLE.")


def on_stage(model: Path | None, dtype: str, num_steps: int, play: Callable[[Stage], _Result]) -> _Result:
    """Return what `play` returns, its steps shown on stderr. A program that fails is told with its last words."""
    with progress_bar() as bar:
        task = bar.add_task("starting", total=None)
        from kvhoist.demo.child import ServerFailedError
        from kvhoist.demo.fast_dtype import fast_dtype
        from kvhoist.demo.signals import ended_by_signals

        stage = Stage(
            model=_model_folder(model, lambda what: bar.update(task, description=what)),
            dtype=fast_dtype() if dtype == "auto" else dtype,
            cache_dir=Settings.from_env().cache_dir,
            on_step=lambda what: bar.update(task, description=what, advance=1),
            say=lambda line: bar.console.print(line, highlight=False),
        )
        bar.reset(task, total=num_steps)
        stage.say(f"Servers take a minute or more to start; their logs go to {stage.cache_dir}.")
        try:
            with ended_by_signals():
                return play(stage)
        except ServerFailedError as error:
            bar.console.print(Text(error.tail), highlight=False)
            raise


def _model_folder(model: Path | None, on_step: OnStep) -> Path:
    if model is None:
        return smollm2(on_step)
    folder = user_path(model).absolute()
    if not (folder / "config.json").is_file():
        raise ConfigError("--model is no model folder", got=str(folder), expected="a folder with config.json")
    return folder
