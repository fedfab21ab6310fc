"""The check that torch and transformers are there, before anything of this package imports them."""

from __future__ import annotations

import importlib.util

from kvhoist.errors import MissingDependencyError

_missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
if _missing:
    raise MissingDependencyError(
        "the transformers adapter needs packages that are not installed",
        got=f"no {' and no '.join(_missing)}",
        expected="torch >= 2.9 and transformers >= 5",
        remedy="Run: pip install 'kvhoist[transformers]'.",
    )
