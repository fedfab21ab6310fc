"""How long a request waits for pages that come from storage, beyond which it computes them itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from kvhoist.checks import seconds
from kvhoist.errors import PolicyError


class PrefetchWait(StrEnum):
    """The names of the prefetch policies, as SGLang has them."""

    BEST_EFFORT = "best_effort"  # not at all: pages come for later requests
    WAIT_COMPLETE = "wait_complete"  # until all are there or have failed
    TIMEOUT = "timeout"  # so many seconds, and so many for each page


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """A request waits `base_s` seconds and `per_page_s` for each page that it waits for."""

    base_s: float
    per_page_s: float = 0.0

    @classmethod
    def parse(cls, name: str, timeout_s: float, timeout_per_page_s: float) -> PrefetchPolicy:
        """Raises PolicyError for an unknown name, ConfigError for times that cannot be; they are those of `timeout`."""
        if name not in list(PrefetchWait):
            raise PolicyError("no such prefetch policy", got=repr(name), choices=[str(wait) for wait in PrefetchWait])
        base_s = seconds("prefetch_timeout_s", timeout_s)
        per_page_s = seconds("prefetch_timeout_per_page_s", timeout_per_page_s)
        if name == PrefetchWait.BEST_EFFORT:
            return cls(0.0)
        return cls(math.inf) if name == PrefetchWait.WAIT_COMPLETE else cls(base_s, per_page_s)

    @property
    def waits(self) -> bool:
        """Whether a request waits at all."""
        return self.limit_s(1) > 0

    def limit_s(self, num_pages: int) -> float:
        return self.base_s + self.per_page_s * num_pages
