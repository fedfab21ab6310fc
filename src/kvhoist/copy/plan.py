"""CopyPlan: how the bytes of one cache group get from one layout to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from kvhoist.copy.nests import Nest, make_nests, steps_per_unit
from kvhoist.copy.rounds import CopyRounds, divisor_of, rounds_of
from kvhoist.errors import ConfigError, LayoutError, PageIdError
from kvhoist.layout import Layout, Unit
from kvhoist.messages import LEFT_OUT
from kvhoist.platform.base import IdArray
from kvhoist.units import format_bytes

Steps: TypeAlias = tuple[IdArray, ...]
"""For every step the id of its unit, and where a unit holds several the block in it."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which copy engine runs a plan for `from_pages` pages and more, in how many groups of layers, and why that one."""

    engine: str
    why: str
    from_pages: int = 1
    num_groups: int = 1

    def __str__(self) -> str:
        pages = "" if self.from_pages == 1 else f" from {self.from_pages} pages on"
        groups = "" if self.num_groups == 1 else f" in {self.num_groups} layer groups"
        return f"{self.engine}{pages}{groups} ({self.why})"


@dataclass(frozen=True)
class CopyPlan:
    """The fewest, longest runs that move one page from `src` to `dst`, as loops over offsets into their buffers.

    `step` is what the nests move at once: a block where either side's ids name blocks (they need not be adjacent, so no
    run crosses one), else a page. Independent of ids, addresses and devices. `choices` are set by `with_choices`.

    Ids come as int64 arrays, for every engine alike. Where the ids of `dst` name blocks, LEFT_OUT (-1) among them means
    that this block is not written and the rest of its page is; anywhere else it is an error, as are other negative ids.
    """

    src: Layout
    dst: Layout
    layers: tuple[int, ...]
    step: Unit
    nests: tuple[Nest, ...]
    choices: tuple[EngineChoice, ...] = ()

    @classmethod
    def make(cls, src: Layout, dst: Layout, *, layers: Sequence[int] | None = None) -> CopyPlan:
        """Plan the copy of `layers` (layer numbers of the group; default all).

        Raises LayoutError for layouts of different groups, ConfigError for layers that the group does not have.
        """
        group = src.group
        if dst.group != group:
            raise LayoutError(
                "a plan needs two layouts of one cache group",
                got=f"{src.name!r} of {src.group.describe()}, {dst.name!r} of {dst.group.describe()}",
                expected="the same components, page_tokens and blocks_per_page",
            )
        chosen = tuple(sorted(set(group.layers if layers is None else layers)))
        if not chosen or not set(chosen) <= set(group.layers):
            raise ConfigError(
                "a plan for layers that the cache group does not have",
                got=list(chosen),
                expected=f"at least one of {list(group.layers)}",
            )
        by_block = group.blocks_per_page > 1 and Unit.BLOCK in (src.unit, dst.unit)
        step = Unit.BLOCK if by_block else Unit.PAGE
        per_unit = (steps_per_unit(src, step), steps_per_unit(dst, step))
        return cls(src, dst, chosen, step, make_nests(src, dst, frozenset(chosen), per_unit))

    def for_layers(self, first: int, last: int) -> CopyPlan:
        """Return the plan of this one's layers `first <= layer < last`, with the same choices of engines.

        Raises ConfigError where it has none there.
        """
        chosen = [layer for layer in self.layers if first <= layer < last]
        plan = CopyPlan.make(self.src, self.dst, layers=chosen)
        return plan.with_choices(self.choices)

    def layer_groups(self, num_groups: int) -> tuple[CopyPlan, ...]:
        """Cut the plan into at most `num_groups` plans of consecutive layers, first layers first, as even as can be."""
        count = max(1, min(num_groups, len(self.layers)))
        cuts = [len(self.layers) * i // count for i in range(count + 1)]
        return tuple(self.for_layers(self.layers[a], self.layers[b - 1] + 1) for a, b in pairwise(cuts))

    def with_choices(self, choices: Sequence[EngineChoice]) -> CopyPlan:
        """Return the plan with engines by number of pages, ascending from 1."""
        return CopyPlan(self.src, self.dst, self.layers, self.step, self.nests, tuple(choices))

    def choice_for(self, num_pages: int) -> EngineChoice:
        """Return the engine that moves so many pages at once."""
        return next(choice for choice in reversed(self.choices) if choice.from_pages <= max(1, num_pages))

    @cached_property
    def steps_per_page(self) -> int:
        return self.src.group.blocks_per_page if self.step is Unit.BLOCK else 1

    @cached_property
    def num_runs(self) -> int:
        """Runs of one page."""
        return self.steps_per_page * sum(nest.num_runs for nest in self.nests)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes moved for one page."""
        return self.steps_per_page * sum(nest.num_bytes for nest in self.nests)

    @property
    def min_run_bytes(self) -> int:
        return min(nest.run_bytes for nest in self.nests)

    @property
    def max_run_bytes(self) -> int:
        return max(nest.run_bytes for nest in self.nests)

    @cached_property
    def alignment_bytes(self) -> int:
        """The largest power of two that divides every run's length and both of its offsets, for any ids."""
        divisor = divisor_of(self.nests)
        return divisor & -divisor

    @cached_property
    def rounds(self) -> CopyRounds | None:
        """How the kernels move the runs between buffers that are aligned to 16 bytes; None where they cannot."""
        return rounds_of(self.nests)

    @property
    def step_bytes(self) -> int:
        """Bytes moved by one step."""
        return self.page_bytes // self.steps_per_page

    @property
    def steps_per_unit(self) -> tuple[int, int]:
        """How many steps one source id and one destination id name."""
        return steps_per_unit(self.src, self.step), steps_per_unit(self.dst, self.step)

    def check_ids(self, src_units: ArrayLike, dst_units: ArrayLike) -> tuple[IdArray, IdArray]:
        """Return the ids as int64 arrays, once all of them are usable; nothing was written by then. Destination blocks
        that are LEFT_OUT stay in their places.

        Raises PageIdError for an id outside of its layout or a destination named twice, ConfigError for arrays that are
        not integers in one dimension or do not name the same number of pages.
        """
        src = _checked(src_units, self.src)
        dst = _checked(dst_units, self.dst, may_leave_out=self.dst.unit is Unit.BLOCK)
        per_src, per_dst = self.steps_per_unit
        if len(src) * per_src != len(dst) * per_dst:
            raise ConfigError(
                "source and destination ids do not name the same number of pages",
                got=f"{len(src)} {self.src.unit} ids of {self.src.name!r}, "
                f"{len(dst)} {self.dst.unit} ids of {self.dst.name!r}",
                expected=f"{per_dst} source ids for {per_src} destination ids",
            )
        if len(dst) > 1:
            ordered = np.sort(dst)
            twice = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] != LEFT_OUT)]
            if len(twice):
                raise PageIdError(
                    f"a {self.dst.unit} of {self.dst.name!r} is the destination of two copies at once",
                    got=f"{self.dst.unit} ids {np.unique(twice)[:8].tolist()} more than once",
                    expected="each destination once",
                )
        return src, dst

    def steps_of(self, src: IdArray, dst: IdArray) -> tuple[Steps, Steps]:
        """Return the steps that checked ids name, on either side, less those of blocks that are LEFT_OUT."""
        src_steps, dst_steps = map(_steps, (src, dst), self.steps_per_unit)
        kept = dst != LEFT_OUT  # only blocks can be left out, and one of them is one step
        if kept.all():
            return src_steps, dst_steps
        return tuple(ids[kept] for ids in src_steps), tuple(ids[kept] for ids in dst_steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON."""
        return {
            "src": self.src.name,
            "dst": self.dst.name,
            "layers": list(self.layers),
            "step": self.step.value,
            "steps_per_page": self.steps_per_page,
            "page_bytes": self.page_bytes,
            "runs_per_page": self.num_runs,
            "min_run_bytes": self.min_run_bytes,
            "max_run_bytes": self.max_run_bytes,
            "alignment_bytes": self.alignment_bytes,
            "rounds": None if self.rounds is None else {**asdict(self.rounds), "round_bytes": self.rounds.round_bytes},
            "engines": [asdict(choice) for choice in self.choices],
            "loops": [
                {"times": times, "run_bytes": run_bytes, "axes": [axis._asdict() for axis in axes]}
                for (run_bytes, axes), times in self._loops().items()
            ],
        }

    def _loops(self) -> Counter[tuple[int, tuple[Any, ...]]]:
        return Counter((nest.run_bytes, nest.axes) for nest in self.nests)

    def __str__(self) -> str:
        widths = sorted({nest.run_bytes for nest in self.nests})
        shown = f"{widths[0]} B" if len(widths) == 1 else f"{widths[0]} to {widths[-1]} B"
        steps = f" in {self.steps_per_page} blocks" if self.step is Unit.BLOCK else ""
        lines = [
            f"{_name(self.src)} -> {_name(self.dst)}",
            f"  page    {format_bytes(self.page_bytes)}{steps}, {self.num_runs} runs, "
            f"{len(self.layers)} layers ({self.layers[0]} to {self.layers[-1]})",
            f"  run     {shown}, aligned to {self.alignment_bytes} B",
            f"  rounds  {self.rounds or 'none: the kernels cannot move these runs'}",
            *(f"  engine  {choice}" for choice in self.choices or ("not chosen yet",)),
        ]
        for (run_bytes, axes), times in self._loops().items():
            loops = " x ".join(f"{a.length} (src +{a.src_stride_bytes}, dst +{a.dst_stride_bytes})" for a in axes)
            lines.append(f"  loop    {times} x [{loops or '1'}] of {run_bytes} B")
        return "\n".join(lines)


def _steps(units: IdArray, steps_per_unit: int) -> Steps:
    if steps_per_unit == 1:
        return (units,)
    return np.repeat(units, steps_per_unit), np.tile(np.arange(steps_per_unit), len(units))


def _name(layout: Layout) -> str:
    return f"{layout.name} ({layout.num_units} {layout.unit}s)"


def _checked(units: ArrayLike, layout: Layout, *, may_leave_out: bool = False) -> IdArray:
    ids = np.asarray(units)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ConfigError(
            f"{layout.unit} ids of {layout.name!r} are not a list of integers",
            got=f"{ids.ndim} dimensions of {ids.dtype}",
            expected="one dimension of integers",
        )
    outside = ids[(ids < (LEFT_OUT if may_leave_out else 0)) | (ids >= layout.num_units)]
    if outside.size:
        raise PageIdError(
            f"{layout.unit} ids outside of {layout.name!r}",
            got=f"{outside[:8].tolist()}",
            expected=f"ids from 0 to {layout.num_units - 1}"
            + (f", or {LEFT_OUT} for a block to be left out" if may_leave_out else ""),
        )
    return ids.astype(np.int64, copy=False)
