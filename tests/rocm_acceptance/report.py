"""The HTML page of an acceptance run: one file that refers to no other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rocm_acceptance import pictures
from rocm_acceptance.speeds import KINDS
from rocm_acceptance.target import Row

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2em }
table { border-collapse: collapse; margin: .6em 0 } .wide { overflow-x: auto }
th, td { border: 1px solid #ddd; padding: .2em .6em; text-align: left; vertical-align: top }
th { background: #f5f5f5 } td.number { text-align: right; font-variant-numeric: tabular-nums }
.passed { color: #1b7a4b } .failed { color: #b3261e; font-weight: bold } .skipped { color: #8a6100 }
.note { background: #fff4d6; border: 1px solid #e6c66b; padding: .6em 1em }
pre { background: #f7f7f7; padding: .6em; overflow-x: auto; white-space: pre-wrap } img { max-width: 100% }
"""

_SIMULATED = (
    "Simulated: this ran on a CPU, on a stand-in for a HIP runtime, with a part of the sizes. It shows that the parts "
    "run and that bytes were right there. It measured no speed, and says nothing about any GPU."
)


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def page(result: Mapping[str, Any]) -> str:
    """Return the whole page."""
    kind = "simulated" if result["simulated"] else "measured"
    title = f"kvhoist on an AMD GPU: {result['status']} ({kind}, {result['date'][:10]})"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="note">{escape(_SIMULATED)}</p>' if result["simulated"] else "",
        f"<p>Command: <code>{escape(result['command'])}</code></p>",
        table(
            ("part", "verdict", "seconds", "why"),
            ([p["title"], verdict(p), p["seconds"], p["reason"]] for p in result["parts"]),
        ),
        *(_section(part, result) for part in result["parts"]),
        _section_of_host(result["machine"]),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    """Return a table; numbers stand to the right, and text is escaped unless it is Html."""
    lines = ["".join(f"<th>{escape(str(name))}</th>" for name in head)]
    lines += ["".join(_cell(value) for value in row) for row in rows]
    return Html('<div class="wide"><table>' + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>")


def verdict(part: Mapping[str, Any]) -> Html:
    return Html(f'<span class="{part["status"]}">{part["status"]}</span>')


def _cell(value: object) -> str:
    if isinstance(value, Html):
        return f"<td>{value}</td>"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="number">{value:,}</td>'
    return f"<td>{escape('' if value is None else str(value))}</td>"


def _section(part: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    rows = part["rows"]
    draw = _BODIES.get(part["name"], _as_it_is)
    body = draw(rows, result) if rows and part["status"] != "skipped" else ""
    wrong = [row for row in rows if row.get("pass") is False]
    lines = [f"<h2>{escape(part['title'])}: {verdict(part)}</h2>", f"<p>{escape(part['reason'])}</p>", body]
    if wrong and draw is not _as_it_is:
        lines += ["<p>Wrong:</p>", _as_it_is(wrong, result)]
    if part["said"] and part["status"] == "failed":
        lines.append(f"<p>Its last words:</p><pre>{escape(part['said'])}</pre>")
    return "\n".join(lines)


def _section_of_host(machine: Mapping[str, Any]) -> str:
    return "<h2>The host</h2>" + table(("what", "found"), [(name, str(value)) for name, value in machine.items()])


def _as_it_is(rows: Sequence[Row], _: Mapping[str, Any]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return table(names, ([_plain(row.get(name)) for name in names] for row in rows))


def _plain(value: object) -> object:
    """Return what a cell can hold: lists of objects as tables of their own."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items())
    if isinstance(value, list):
        if value and all(isinstance(one, Mapping) for one in value):
            return Html(_as_it_is(value, {}))
        return ", ".join(map(str, value))
    return value


def _one_result(rows: Sequence[Row], _: Mapping[str, Any]) -> str:
    return "\n".join(table(("what", "found"), [(name, _plain(value)) for name, value in row.items()]) for row in rows)


def _matrix(rows: Sequence[Row], _: Mapping[str, Any]) -> str:
    cells = [row for row in rows if "cache" in row]
    engines = list(dict.fromkeys(row["engine"] for row in cells))
    by_place = {(row["cache"], row["order"], row["engine"]): row for row in cells}
    lines = [
        (cache, order, *(_differing(by_place.get((cache, order, engine))) for engine in engines))
        for cache, order in dict.fromkeys((row["cache"], row["order"]) for row in cells)
    ]
    counts = sorted({count for row in cells for count in row["pages"]})
    total = sum(row.get("bytes", 0) for row in cells)
    text = (
        f"{len(cells)} combinations, each with transfers of {', '.join(map(str, counts))} pages to the host and back, "
        f"{total:,} bytes in all. The numbers are bytes that differ from the numpy oracle's, guards around tensors too."
    )
    return f"<p>{escape(text)}</p>" + table(("cache", "order of host pages", *engines), lines)


def _differing(row: Row | None) -> object:
    if row is None:
        return "not run"
    return Html('<span class="failed">error</span>') if "error" in row else row["differing_bytes"]


def _write_back(rows: Sequence[Row], result: Mapping[str, Any]) -> str:
    known = result["published"]
    by_place = {(row["kind"], row["row_bytes"], row["layers"]): row for row in rows if "kind" in row}
    setting = known["setting"]
    text = (
        f"GiB/s by events, {setting['pages']} scattered pages of {setting['pages_in_all']}, "
        f"{setting['page_tokens']} tokens a page, {setting['dtype']}. A cell: staged / mapped as measured here; "
        f"below it {' / '.join(known['arms'])}, {known['source']}. Speeds decide nothing; right bytes do."
    )
    found = [f"<p>{escape(text)}</p>"]
    for kind in KINDS:
        layers = list(dict.fromkeys(n for cells in known[kind].values() for n in cells))
        lines = [
            (f"{row_bytes} B", *(_speeds(by_place.get((kind, int(row_bytes), int(n))), cells[n]) for n in layers))
            for row_bytes, cells in known[kind].items()
        ]
        found.append(f"<h3>{kind}</h3>" + table(("row", *(f"{n} layers" for n in layers)), lines))
    return "\n".join([*found, pictures.write_back(rows, known)])


def _speeds(row: Row | None, figures: Sequence[float]) -> Html:
    if row is None:
        measured = "not run"
    elif "error" in row:
        measured = "error"
    else:
        measured = _rates(row["staged_gib_s"], row["mapped_gib_s"])
    return Html(f"{measured}<br><small>{figures[0]:.2f} / {figures[1]:.2f}</small>")


def _rates(*rates: float | None) -> str:
    return " / ".join(f"{rate:.2f}" for rate in rates if rate is not None) or "bytes right"


def _loads(rows: Sequence[Row], _: Mapping[str, Any]) -> str:
    head = ("cache", "pages", "engine", "block quota", "GiB/s", "one plain copy, GiB/s")
    fields = ("cache", "pages", "engine", "block_quota")
    lines = [
        (*(row.get(field) for field in fields), _rates(row["load_gib_s"]), _rates(row["peak_gib_s"]))
        for row in rows
        if "load_gib_s" in row
    ]
    text = "dma is what others call direct: copies of each run, without a kernel. Indices are scattered."
    return f"<p>{text}</p>" + table(head, lines) + pictures.loads(rows)


_BODIES = {
    "matrix": _matrix,
    "driver-memory": _matrix,
    "write-back": _write_back,
    "load": _loads,
    "migration": _one_result,
}
