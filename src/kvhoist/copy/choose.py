"""Which copy engine runs a plan: the one place where that is decided."""

from __future__ import annotations

import logging

from kvhoist.copy.plan import CopyPlan, EngineChoice
from kvhoist.errors import ConfigError
from kvhoist.platform.base import Platform

_log = logging.getLogger(__name__)

AUTO = "auto"
ENGINES = ("reference", "staged", "dma", "mapped")


def choose_engine(plan: CopyPlan, platform: Platform, requested: str = AUTO) -> EngineChoice:
    """Return the engine for `plan` on `platform`: the one `requested` (the `io_backend` option), or for `auto` the
    first of the platform's `capabilities.engines`, logged.

    Raises ConfigError for an unknown engine, or one that this platform does not have: a request is never replaced.
    """
    offered = platform.capabilities.engines
    if requested == AUTO:
        why = f"auto: {_first_reason(plan, platform)}"
        _log.info("%s -> %s: copy engine %s (%s)", plan.src.name, plan.dst.name, offered[0], why)
        return EngineChoice(offered[0], why)
    if requested not in ENGINES:
        raise ConfigError("unknown copy engine", got=repr(requested), choices=(AUTO, *ENGINES))
    if requested not in offered:
        raise ConfigError(
            f"copy engine {requested!r} does not run on the {platform.name} platform",
            got=f"io_backend={requested!r}, device {platform.device}",
            choices=(AUTO, *offered),
            remedy=f"Set io_backend to {AUTO!r}, or keep the KV tensors on a device that has it.",
        )
    return EngineChoice(requested, "requested")


def _first_reason(plan: CopyPlan, platform: Platform) -> str:
    offered = platform.capabilities.engines
    only = "the only engine" if len(offered) == 1 else f"preferred of {', '.join(offered)}"
    return f"{only} of the {platform.name} platform, runs of {plan.min_run_bytes} B or more"
