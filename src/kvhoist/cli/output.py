"""What commands share: two consoles, the `--json` option, tables of plain data.

Results go to stdout, all else (progress, errors, questions) to stderr. With `--json`, stdout gets one document, last.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw it, as .png, .svg or .pdf.", show_default=False)
]

_PLAIN_WIDTH = 140
"""Columns where stdout is no terminal: rich would assume 80 and cut tables."""

_MAX_COLUMNS = 13


def console() -> Console:
    """Return the console of results."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)


def side_console() -> Console:
    """Return the console of progress, questions and errors."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else _PLAIN_WIDTH, highlight=False)


def print_json(document: Mapping[str, Any]) -> None:
    """Print the one document of a `--json` command."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    sys.stdout.flush()


@contextmanager
def working(what: str, *, as_json: bool) -> Iterator[None]:
    """Show that `what` is being done. With `as_json`, what libraries print meanwhile goes to stderr."""
    with side_console().status(what), redirect_stdout(sys.stderr if as_json else sys.stdout):
        yield


def progress_bar() -> Progress:
    """Return a bar on stderr for work of known length; shown only where that is a terminal, and gone afterwards."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    side = side_console()
    return Progress(*columns, console=side, transient=True, disable=not side.is_terminal)


def tables_of(data: Mapping[str, Any]) -> list[RenderableType]:
    """Return tables for nested plain data: lists of mappings become a table each, the rest one of names and values."""
    facts = Table("", "", show_header=False, box=None, padding=(0, 2, 0, 0))
    tables: list[RenderableType] = []
    for name, value in _leaves("", data):
        if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
            tables.append(table_of(name, value))
        else:
            facts.add_row(Text(name), _cell(value))
    return [facts, *tables]


def table_of(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return one table of `rows`, nested mappings flattened to dotted columns, numbers to the right.

    What fewer than half of the rows have goes to a last column `detail`. Where there are more columns than a screen
    holds, the rows stand side by side instead.
    """
    flat = [_with_detail(dict(_leaves("", row)), rows) for row in rows]
    columns = sorted(dict.fromkeys(name for row in flat for name in row), key="detail".__eq__)
    table = Table(title=title or None, title_justify="left", box=SIMPLE, padding=(0, 1), show_edge=False)
    if len(columns) > _MAX_COLUMNS:
        table.show_header = False
        for _ in range(len(flat) + 1):
            table.add_column()
        for column in columns:
            table.add_row(Text(column), *(_cell(row.get(column)) for row in flat))
        return table
    for column in columns:
        cells = [_cell(row.get(column)) for row in flat]
        numeric = all(isinstance(row.get(column), int | float | None) for row in flat)
        # Where room is short, cells and headers break at their words only.
        width = max(len(word) for cell in cells for word in (cell.plain.split() or [""]))
        table.add_column(column.replace("_", " "), justify="right" if numeric else "left", min_width=width)
    for row in flat:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    return table


def _with_detail(row: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = Counter(name for other in rows for name, _ in _leaves("", other))
    rare = {name: value for name, value in row.items() if counts[name] * 2 < len(rows)}
    if not rare:
        return row
    detail = ", ".join(f"{name.rpartition('.')[2]} {_cell(value)}" for name, value in rare.items())
    return {**{name: value for name, value in row.items() if name not in rare}, "detail": detail}


def _leaves(prefix: str, data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(f"{name}.", value)
        else:
            yield name, value


def _cell(value: object) -> Text:
    if value is True or value is False:
        return Text("yes" if value else "no", style="green" if value else "red")
    if isinstance(value, float):
        return Text(f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}")
    if isinstance(value, int):
        return Text(f"{value:,}")
    return Text("" if value is None else str(value))
