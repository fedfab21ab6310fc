"""What namespaces stand for, as stores keep it: JSON that anybody may have written."""

from __future__ import annotations

import json
import re
from typing import Any

_DIGEST = re.compile("[0-9a-f]{64}")


def parse(text: bytes) -> Any:
    """Return what JSON says. Raises ValueError for all that is none, or nests too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def read_note(digest: object, fields: object) -> tuple[bytes, dict[str, str]] | None:
    """Return a namespace's digest, given as hex, and its fields; None where the parts are no note of kvhoist's. The
    texts are a stranger's: whoever prints them takes care of what a terminal obeys."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest) or not isinstance(fields, dict) or not fields:
        return None
    texts = {name: value for name, value in fields.items() if isinstance(value, str)}
    return (bytes.fromhex(digest), texts) if len(texts) == len(fields) else None
