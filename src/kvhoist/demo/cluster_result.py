"""What the cluster's demo shows: a row an answer, and what is not as it must be."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

RECOVERY_TIMEOUT_S = 120.0
"""How long B may take to load again after the master is back."""

_IDLE_KINDS = {"A": ("load", "prefetch"), "B": ("offload", "persist")}
"""Jobs that the role of each server excludes."""


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """One answer of B: which of its prompt's tokens came from where, and what is wrong with it, None where nothing is.
    `prefill_seconds` is what A took before, 0 where no router asked it."""

    what: str
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    stored_tokens: int
    prefill_seconds: float
    ttft_seconds: float
    ttft_recomputed_seconds: float
    problem: str | None

    @property
    def ttft_ratio(self) -> float:
        return self.ttft_seconds / self.ttft_recomputed_seconds

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ttft_ratio": round(self.ttft_ratio, 4)}


@dataclass
class ClusterResult:
    """All rows; pages that each server moved, by kind; how long B computed after the master was back."""

    rows: list[ClusterRow] = field(default_factory=list)
    pages: dict[str, dict[str, int]] = field(default_factory=dict)
    recovery_seconds: float | None = None
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        """What is not as it must be, for people."""
        wrong = [f"{row.what}: {row.problem}" for row in self.rows if row.problem is not None]
        for name, pages in self.pages.items():
            moved = [kind for kind in _IDLE_KINDS[name] if pages[kind]]
            wrong += [f"server {name} is not to {kind}, and moved {pages[kind]} pages so" for kind in moved]
        if self.recovery_seconds is None:
            wrong.append(f"B loaded nothing in {RECOVERY_TIMEOUT_S:.0f} s after the master was back")
        return wrong

    def to_dict(self) -> dict[str, Any]:
        return {
            "identical": not self.problems,
            "problems": self.problems,
            "rows": [row.to_dict() for row in self.rows],
            "pages": self.pages,
            "recovery_seconds": self.recovery_seconds,
            "seconds": round(self.seconds, 1),
        }
