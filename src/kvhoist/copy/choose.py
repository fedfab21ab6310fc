"""Which copy engine runs a plan: the one place where that is decided."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from kvhoist.copy.nests import Nest
from kvhoist.copy.placed import placed
from kvhoist.copy.plan import CopyPlan, EngineChoice
from kvhoist.copy.ring import CHUNKS
from kvhoist.copy.rounds import SERVED, refusal_of, rounds_of
from kvhoist.copy.staged import RINGS
from kvhoist.errors import ConfigError
from kvhoist.layout import HostOrder
from kvhoist.platform.base import Capabilities, Device, MemoryRegion
from kvhoist.units import format_bytes

_log = logging.getLogger(__name__)


class Offering(Protocol):
    """What of a platform decides: also of one that is not here."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> Device: ...

    @property
    def capabilities(self) -> Capabilities: ...


AUTO = "auto"
ENGINES = ("reference", "staged", "dma", "mapped")

MAPPED_BELOW_BYTES = 16 << 20
"""Loads of fewer bytes go through `mapped`: on an H200 it ends there when `staged` does or before, by the wall clock,
for half of the CPU's time or less (docs/results/h200, copy). Offloads never do: nobody waits for them, and their stores
slow a decode-like stream by half while they run (interference)."""

LOAD_GROUPS = 4
GROUP_BYTES = 32 << 20
"""Loads arrive in so many groups of layers where a group has so many bytes: below, the copies that groups add cost more
than 2 % (copy)."""


def choose_engines(
    plan: CopyPlan,
    platform: Offering,
    requested: str = AUTO,
    *,
    loads: bool,
    staging_bytes: int,
    device: Sequence[MemoryRegion] = (),
) -> tuple[EngineChoice, ...]:
    """Return the engines for `plan` on `platform` by number of pages, from 1 page on, and log them: the one `requested`
    (the `io_backend` option), or what is fastest by measurement for `auto`. `device` are the cache's buffers, as far as
    they are known.

    Raises ConfigError for an unknown engine, or one that this platform does not have: a request is never replaced.
    """
    offered = platform.capabilities.engines
    if requested not in (AUTO, *ENGINES):
        raise ConfigError("unknown copy engine", got=repr(requested), choices=(AUTO, *ENGINES))
    if requested not in (AUTO, *offered):
        raise ConfigError(
            f"copy engine {requested!r} does not run on the {platform.name} platform",
            got=f"io_backend={requested!r}, device {platform.device}",
            choices=(AUTO, *offered),
            remedy=f"Set io_backend to {AUTO!r}, or keep the KV tensors on a device that has it.",
        )
    if requested != AUTO:
        engines = [(1, requested, "requested")]
    elif len(offered) == 1:
        engines = [(1, offered[0], f"auto: the only engine of the {platform.name} platform")]
    else:
        engines = _fastest(plan, staging_bytes, device, loads=loads)
    choices = _with_groups(plan, engines, loads=loads)
    for choice in choices:
        _log.info("%s -> %s: %s", plan.src.name, plan.dst.name, choice)
    return choices


def _fastest(
    plan: CopyPlan, staging_bytes: int, device: Sequence[MemoryRegion], *, loads: bool
) -> list[tuple[int, str, str]]:
    """Return (from how many pages on, engine, why)."""
    nests = _at(plan, device, loads=loads)
    if rounds_of(nests) is None:
        return [(1, "dma", f"auto: kernels move {SERVED}, here: {refusal_of(nests)}")]
    most = staging_bytes // RINGS // CHUNKS
    if plan.src.group.page_pitch_bytes > most:
        many = ("dma", f"auto: a page does not fit into a sixth of {format_bytes(staging_bytes)} of staging memory")
    else:
        many = ("staged", f"auto: whole pages cross the link, whatever their runs of {plan.min_run_bytes} B are")
    from_pages = -(-MAPPED_BELOW_BYTES // plan.page_bytes)
    if not loads or from_pages < 2:
        return [(1, *many)]
    return [(1, "mapped", f"auto: loads below {format_bytes(MAPPED_BELOW_BYTES)}"), (from_pages, *many)]


def _at(plan: CopyPlan, device: Sequence[MemoryRegion], *, loads: bool) -> list[Nest]:
    """Return the plan's nests with addresses on the cache's side, as far as they are known; host pages are aligned."""
    unknown = [0] * (1 + max(max(nest.src.buffer, nest.dst.buffer) for nest in plan.nests))
    cache = [region.address for region in device] or unknown
    return [placed(nest, *((unknown, cache) if loads else (cache, unknown))) for nest in plan.nests]


def _with_groups(plan: CopyPlan, engines: list[tuple[int, str, str]], *, loads: bool) -> tuple[EngineChoice, ...]:
    """Let loads arrive in groups of layers from so many pages on as make a group worth its copies."""
    direct = HostOrder.PAGE_FIRST_DIRECT in (plan.src.name, plan.dst.name)
    if not loads or not direct:
        return tuple(EngineChoice(engine, why, first) for first, engine, why in engines)
    num_groups = min(LOAD_GROUPS, len(plan.layers))
    grouped = max(1, -(-GROUP_BYTES * num_groups // plan.page_bytes))
    found = []
    for first in sorted({grouped, *(one[0] for one in engines)}):
        _, engine, why = next(one for one in reversed(engines) if one[0] <= first)
        found.append(EngineChoice(engine, why, first, num_groups if first >= grouped else 1))
    return tuple(found)
