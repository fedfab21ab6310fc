"""`kvhoist store`: what lies in a store's folder, whether it is sound, and how to remove it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvhoist.cli.output import JsonOption, console, print_json, progress_bar, side_console, table_of, tables_of
from kvhoist.settings import Settings, user_path
from kvhoist.storage import Sealer
from kvhoist.storage.admin import NamespaceSummary, ScrubReport, describe, list_namespaces, remove, scrub
from kvhoist.storage.open import folder_of
from kvhoist.units import format_bytes

store_app = typer.Typer(
    name="store", help="Look into a store folder, check every page, remove pages.", no_args_is_help=True
)

_MAX_SHOWN_CHARS = 100

FolderArgument = Annotated[str, typer.Argument(metavar="FOLDER", help="The store's folder; file:FOLDER works too.")]


@store_app.command("ls")
def list_(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """List the namespaces, the largest first: model, dtype, pages, bytes, age."""
    found = list_namespaces(store_path(folder))
    if as_json:
        print_json({"folder": str(store_path(folder)), "namespaces": [summary.to_dict() for summary in found]})
    elif found:
        console().print(table_of("", [_row(summary) for summary in found]))
    else:
        console().print("no pages and no namespaces")


@store_app.command()
def stat(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Count pages, bytes of pages and of files, segments, and what is damaged."""
    data = describe(store_path(folder))
    if as_json:
        print_json(data)
    else:
        console().print(*tables_of(data), sep="\n")


@store_app.command("scrub")
def scrub_(
    folder: FolderArgument,
    read_only: Annotated[bool, typer.Option("--read-only", help="Report bad pages, and leave them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read and check every page, and take bad ones out of use. Exit code 1: something was bad.

    Signatures are checked with the secret of KVHOIST_STORE_SECRET or KVHOIST_STORE_SECRET_FILE.
    """
    path, sealer = store_path(folder), Sealer(Settings.from_env().store_secret)
    list_namespaces(path)  # refuses what is no store, before opening it for writing would make one
    with progress_bar() as bar:
        task = bar.add_task("checking pages", total=None)
        report = scrub(
            path,
            sealer,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            read_only=read_only,
        )
    if as_json:
        print_json(report.to_dict())
    else:
        _print_scrub(report)
    raise typer.Exit(0 if report.clean else 1)


@store_app.command("rm")
def remove_(
    folder: FolderArgument,
    namespace: Annotated[str | None, typer.Argument(help="First hex digits of a namespace; default: all.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove all pages, or those of the namespaces that begin with NAMESPACE. Asks first."""
    path = store_path(folder)
    found = [s for s in list_namespaces(path) if s.namespace.hex().startswith((namespace or "").lower())]
    if found and not yes:
        side_console().print(table_of("", [_row(summary) for summary in found]))
        num_pages = sum(summary.num_pages for summary in found)
        typer.confirm(f"Remove {num_pages} pages of {len(found)} namespaces from {path}?", abort=True, err=True)
    report = remove(path, namespace)
    data = {
        "namespaces": [digest.hex() for digest in report.namespaces],
        "removed_pages": report.removed_pages,
        "left_pages": report.left_pages,
    }
    if as_json:
        print_json(data)
        return
    console().print(f"removed {report.removed_pages} pages of {len(report.namespaces)} namespaces")
    if report.left_pages:
        console().print(f"left {report.left_pages} pages in segments of running processes, which alone may remove them")


def _print_scrub(report: ScrubReport) -> None:
    """Print a line a fault, uncut: a reason is what a person wants to read."""
    for key, reason in report.bad:
        typer.echo(f"{key}: {reason}")
    for place, reason in report.faults.items():
        typer.echo(f"{place}: {reason}")
    num_bad = len(report.bad) + report.damaged_headers
    done = "taken out of use" if report.repaired else "left as they are"
    verdict = f"{num_bad} damaged, {done}" if num_bad else "nothing damaged"
    typer.echo(f"{report.num_pages} pages checked ({format_bytes(report.num_bytes)}): {verdict}")


def store_path(folder: str) -> Path:
    """Return the folder of `folder`, which may be written as `open_store` takes it."""
    if folder.startswith("file:"):
        return folder_of(folder.removeprefix("file:").partition("?")[0])
    return user_path(folder)


def _row(summary: NamespaceSummary) -> dict[str, Any]:
    return {
        "namespace": summary.namespace.hex()[:16],
        "model": _text(summary.fields.get("model_id", '"unknown"')),
        "dtype": _text(summary.fields.get("kv_dtype", '""')),
        "pages": summary.num_pages,
        "size": format_bytes(summary.num_bytes),
        "newest": _age(summary.youngest_s) if summary.num_pages else "",
        "oldest": _age(summary.oldest_s) if summary.num_pages else "",
    }


def _text(field: str) -> str:
    """Return a namespace field's text: fields are JSON, and a long one is a hash. What a stranger wrote may be no JSON,
    or long, or have characters that a terminal obeys."""
    try:
        text = str(json.loads(field))
    except (ValueError, RecursionError):
        text = field
    text = text[:_MAX_SHOWN_CHARS]
    return text if text.isprintable() else repr(text)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
