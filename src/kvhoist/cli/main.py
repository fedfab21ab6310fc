"""The application: its commands, `--version`, and how errors reach a person.

A command is a function in a module of its own, registered here. Commands import what is heavy (torch, engines,
benchmarks) when they run, so that the application starts at once.
"""

from __future__ import annotations

import errno
import logging
import sys
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

import kvhoist
from kvhoist.cli.bench import bench_app
from kvhoist.cli.demo import demo
from kvhoist.cli.demo_cluster import demo_cluster
from kvhoist.cli.demo_vllm import demo_vllm
from kvhoist.cli.doctor import doctor
from kvhoist.cli.explain import explain
from kvhoist.cli.explain_plan import explain_plan
from kvhoist.cli.output import side_console
from kvhoist.cli.running import attach, detach, ps
from kvhoist.cli.store import store_app
from kvhoist.errors import KvhoistError
from kvhoist.settings import Settings

ERROR_EXIT = 2
"""Exit code of a command that was asked for what cannot be; also click's own for wrong usage."""


class _Group(TyperGroup):
    """Turns a KvhoistError of any command, and what the system refuses (a folder without access, a full disk), into one
    line on stderr; others are our bugs and keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvhoistError as error:
            if ctx.params.get("debug"):
                raise
            _print_error(str(error))
            raise typer.Exit(ERROR_EXIT) from error
        except OSError as error:
            if ctx.params.get("debug") or error.errno == errno.EPIPE:  # click ends quietly where the reader has gone
                raise
            where = "" if error.filename is None else f"{error.filename}: "
            _print_error(f"{where}{error.strerror or error}")
            raise typer.Exit(ERROR_EXIT) from error


def _print_error(text: str) -> None:
    line = " ".join(text.encode("utf-8", "replace").decode().split("\n"))
    side_console().print(Text.assemble(("error: ", "bold red"), line), soft_wrap=True)


app = typer.Typer(
    name="kvhoist",
    help="A hierarchical KV cache for LLM serving: device, host memory and disk.",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"kvhoist {kvhoist.__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    # doctor tells what is wrong with the environment and must not fail over it.
    if ctx.invoked_subcommand != "doctor":
        level = "DEBUG" if debug else Settings.from_env().log_level
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


app.command()(demo)
app.command(name="demo-vllm")(demo_vllm)
app.command(name="demo-cluster")(demo_cluster)
app.command()(explain)
app.command(name="explain-plan")(explain_plan)
app.command()(doctor)
app.command()(ps)
app.command()(attach)
app.command()(detach)
app.add_typer(store_app)
app.add_typer(bench_app)


def main() -> None:
    """Run the command line of this process."""
    app(prog_name="kvhoist")
