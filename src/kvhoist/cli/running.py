"""`kvhoist ps`, `attach` and `detach`: the caches that run, and their stores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvhoist.cli.output import JsonOption, console, print_json, table_of, working
from kvhoist.errors import ConfigError
from kvhoist.runtime import Running, ask, running
from kvhoist.settings import Settings
from kvhoist.storage.open import folder_of

PidOption = Annotated[
    int | None, typer.Option("--pid", metavar="N", help="The process; may be left out where one cache runs.")
]
CacheOption = Annotated[
    int | None, typer.Option("--cache", metavar="N", help="Which cache of a process that has several.")
]


_SHOWN = ("pid", "cache", "engine", "model", "started", "store")


def ps(as_json: JsonOption = False) -> None:
    """List the caches that run for this user on this machine, and which store each has."""
    found = running(_folder())
    if as_json:
        print_json({"caches": [_row(one) for one in found]})
    elif found:
        rows = [_row(one) for one in found]
        console().print(table_of("", [{name: str(row.get(name, "")) for name in _SHOWN} for row in rows]))
    else:
        console().print("no cache runs")


def attach(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="file:FOLDER, mooncake:HOST:PORT, …")],
    pid: PidOption = None,
    cache: CacheOption = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait for the answer.")] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Let a running cache use the store at ADDRESS, which the engine's process opens. It must have none."""
    chosen = _chosen(pid, cache)
    with working(f"process {chosen.pid} opens the store", as_json=as_json):
        result = ask(chosen.path, {"do": "attach", "address": _absolute(address)}, timeout)
    if as_json:
        print_json(result)
    else:
        console().print(f"process {chosen.pid}: {_plain(result.get('store'))}", markup=False)


def detach(
    pid: PidOption = None,
    cache: CacheOption = None,
    drain: Annotated[bool, typer.Option(help="Let pages on their way to the store arrive.")] = True,
    timeout: Annotated[float, typer.Option("--timeout", min=0, max=86400, help="Seconds that this may take.")] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Let a running cache use its store no more. Exit code 1: a call of the store hangs, and holds memory until it
    returns; the engine goes on."""
    chosen = _chosen(pid, cache)
    with working(f"process {chosen.pid} gives its store up", as_json=as_json):
        result = ask(chosen.path, {"do": "detach", "drain": drain, "timeout_s": timeout}, timeout + 30.0)
    if as_json:
        print_json(result)
    else:
        console().print(table_of("", [{name: _plain(value) for name, value in result.items()}]))
    raise typer.Exit(1 if result.get("memory_kept") else 0)


def _folder() -> Path:
    folder = Settings.from_env().runtime_dir
    if folder is None:
        raise ConfigError("KVHOIST_RUNTIME_DIR is off", remedy="Set it as it is set for the engine.")
    return folder


def _chosen(pid: int | None, cache: int | None) -> Running:
    found = running(_folder())
    fitting = [one for one in found if pid in (None, one.pid) and cache in (None, one.cache)]
    if len(fitting) == 1:
        return fitting[0]
    choices = [f"--pid {one.pid} --cache {one.cache}" for one in fitting or found]
    if pid is not None and pid not in [one.pid for one in found]:
        raise ConfigError(
            f"no cache of process {pid} runs",
            choices=choices or None,
            remedy=f"It has ended, or listens elsewhere than in {_folder()} (KVHOIST_RUNTIME_DIR).",
        )
    if not found:
        raise ConfigError(
            "no cache runs for this user",
            got=f"no socket in {_folder()}",
            remedy="Set KVHOIST_RUNTIME_DIR as it is set for the engine; its log says where it could not listen.",
        )
    given = [f"--{name} {value}" for name, value in (("pid", pid), ("cache", cache)) if value is not None]
    raise ConfigError(
        "several caches are meant" if fitting else "no cache is meant",
        got=" ".join(given) or "no --pid",
        choices=choices,
        remedy="kvhoist ps lists them.",
    )


def _absolute(address: str) -> str:
    """Return an address that means in the engine's folder what it means in this one."""
    scheme, colon, rest = address.partition(":")
    if scheme != "file" or not colon:
        return address
    place, mark, query = rest.partition("?")
    return f"file:{folder_of(place).absolute()}{mark}{query}"


def _row(one: Running) -> dict[str, Any]:
    named: Mapping[str, Any] = {"pid": one.pid, "cache": one.cache, **one.status}
    row = {name: _plain(value) for name, value in named.items()}
    return row if not one.problem else {**row, "store": _plain(one.problem)}


def _plain(value: Any) -> Any:
    """Return a value of another process without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in value) if isinstance(value, str) else value
