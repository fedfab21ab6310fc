"""Runs parts, each in a process of its own with a deadline, and judges what they say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rocm_acceptance.target import Row

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

_LAST_WORDS = 2000
_KILLED_S = 30


def run_process(
    command: Sequence[str], file: Path, *, deadline_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a part that writes its rows to `file`, at most `deadline_s`, and return `status`, `reason`, `seconds`, `rows`
    and `said` (the end of what it printed). What the part started is killed at its end."""
    began = time.monotonic()
    said = file.with_suffix(".log")
    with said.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that is stuck in the driver
                process.wait(_KILLED_S)
    words = said.read_text(errors="replace")[-_LAST_WORDS:].strip()
    rows = _rows_of(file)
    status, reason = _verdict(rows, _why_ended(code, deadline_s, words))
    seconds = round(time.monotonic() - began, 1)
    return {"status": status, "reason": reason, "seconds": seconds, "rows": rows, "said": words}


def _why_ended(code: int | None, deadline_s: float, words: str) -> str:
    """Return why a part did not come to its end; "" where it did."""
    if code is None:
        return f"stopped after {deadline_s:g} s"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    last = words.splitlines()[-1] if words else "it said nothing"
    return f"ended with exit code {code}: {last}" if code else ""


def _verdict(rows: Sequence[Row], ended: str) -> tuple[str, str]:
    wrong = [row for row in rows if row.get("pass") is False]
    if ended:
        return FAILED, f"{ended}, after {len(rows)} rows{f', last {_label(rows[-1])}' if rows else ''}"
    if wrong:
        return FAILED, f"{len(wrong)} of {len(rows)} rows, first {_label(wrong[0])}"
    for row in rows:
        if "skipped" in row:
            return SKIPPED, str(row["skipped"])
    return (PASSED, "") if rows else (FAILED, "it found nothing")


def _label(row: Row) -> str:
    """Return a row's error, or the words that say which one it is."""
    named = [str(value) for key, value in row.items() if isinstance(value, str | int) and key not in ("pass", "error")]
    return f"{', '.join(named[:4])}{': ' + row['error'] if 'error' in row else ''}"


def _rows_of(file: Path) -> list[Row]:
    """Return the whole lines of a file that may end in the middle of one."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found
