"""How fast scattered pages move between a GPU's cache and pinned host memory, as a share of one plain memcpy.

Every shape is moved to the device and back first, by every engine, and compared. Then the engines, the same pages in
one batch without relayout, and one pinned memcpy of the same number of bytes (the link's peak) take turns: medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvhoist.bench.blobs import NAME as BLOBS
from kvhoist.bench.facts import facts
from kvhoist.bench.rig import STAGING_BYTES, Rig
from kvhoist.bench.shapes import SMOKE, Shape, table_shapes
from kvhoist.bench.timing import Arm, Lead, Peak, Times
from kvhoist.copy.choose import LOAD_GROUPS
from kvhoist.platform.base import Device, Platform
from kvhoist.platform.open import open_platform

TARGETS = {"events": 0.97, "wall": 0.93}
TARGETS_FROM_256_MIB = {"events": 0.98, "wall": 0.96}

_NUM_PAGES = 64
FEW_PAGES = (1, 2, 4, 8, 16, 32)
"""Also measured, on a few shapes: they decide where `auto` changes engines."""

_FEW_SHAPES = (Shape(False, 1024, 32), Shape(False, 2048, 61), Shape(True, 576, 61), Shape(False, 1024, 32, 16))


class _Variant(NamedTuple):
    engine: str
    loads: bool
    num_groups: int = 1

    def __str__(self) -> str:
        groups = f" in {self.num_groups} layer groups" if self.num_groups > 1 else ""
        return f"{'load' if self.loads else 'offload'} by {self.engine}{groups}"


VARIANTS = (
    *(_Variant(engine, loads) for loads in (False, True) for engine in ("staged", "dma", "mapped", BLOBS)),
    _Variant("staged", loads=True, num_groups=LOAD_GROUPS),
    _Variant("dma", loads=True, num_groups=LOAD_GROUPS),
)


def run(device: Device, *, smoke: bool = False, repeats: int = 9, also: Sequence[str] = ()) -> dict[str, Any]:
    """Measure every shape on `device` and return plain data. `also` are others' engines, as `Rig.engine` takes them.
    Raises ConfigError where there is no such GPU or engine, KvhoistError where a byte is wrong."""
    platform = open_platform(device)
    platform.enter_thread()
    variants = [*VARIANTS, *(_Variant(engine, loads) for engine in also for loads in (False, True))]
    repeats = 3 if smoke else repeats
    rows = [
        row
        for shape in (SMOKE if smoke else table_shapes())
        for row in _measure(platform, shape, variants, _counts(shape), repeats)
    ]
    return {
        "bench": "copy",
        "smoke": smoke,
        **facts(device),
        "peak": "one pinned memcpy of the same number of bytes, by events, in the same run",
        "targets": {"below 256 MiB": TARGETS, "from 256 MiB": TARGETS_FROM_256_MIB},
        "staging_bytes": STAGING_BYTES,
        "results": rows,
        "pass": all(row["pass"] for row in rows if row["chosen"] and row["pages"] == _NUM_PAGES),
    }


def _counts(shape: Shape) -> tuple[int, ...]:
    return (*FEW_PAGES, _NUM_PAGES) if shape in _FEW_SHAPES else (_NUM_PAGES,)


def _measure(
    platform: Platform, shape: Shape, variants: Sequence[_Variant], counts: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    rows = []
    with Rig(platform, shape.group, num_pages=2 * max(counts)) as rig:
        engines = {v: rig.engine(v.engine, loads=v.loads, num_groups=v.num_groups) for v in variants}
        lead = Lead(platform)
        for name in {variant.engine for variant in variants} - {BLOBS}:
            rig.check(*(engines[_Variant(name, loads)] for loads in (False, True)))
        for count in counts:
            ids = rig.picked(count)
            arms = {variant: Arm(platform, engine, lead, *ids) for variant, engine in engines.items()}
            peak = Peak(platform, rig.host.region.address, count * shape.group.page_bytes)
            times: dict[_Variant, list[tuple[Times, float]]] = {variant: [] for variant in arms}
            for repeat in range(repeats + 2):  # the first two warm up
                for variant, arm in arms.items():
                    taken = (arm.once(), peak.once(upwards=variant.loads))
                    times[variant] += [taken] if repeat >= 2 else []
            chosen = {_chosen(rig, count, loads=loads) for loads in (False, True)}
            rows += [
                {**_row(shape, count, variant, peak.num_bytes, found), "chosen": variant in chosen}
                for variant, found in times.items()
            ]
    return rows


def _chosen(rig: Rig, num_pages: int, *, loads: bool) -> _Variant:
    choice = rig.choice(num_pages, loads=loads)
    return _Variant(choice.engine, loads, choice.num_groups)


def _row(
    shape: Shape, count: int, variant: _Variant, num_bytes: int, times: list[tuple[Times, float]]
) -> dict[str, Any]:
    median = Times(*(statistics.median(found) for found in zip(*(taken for taken, _ in times), strict=True)))
    peak = statistics.median(seconds for _, seconds in times)
    targets = TARGETS if num_bytes < 256 << 20 else TARGETS_FROM_256_MIB
    shares = {name: round(peak / getattr(median, name), 3) for name in ("events", "idle", "wall")}
    return {
        "shape": str(shape),
        "pages": count,
        "arm": str(variant),
        "mib": round(num_bytes / (1 << 20), 1),
        "peak_gib_s": round(num_bytes / peak / (1 << 30), 2),
        "gib_s": round(num_bytes / median.events / (1 << 30), 2),
        **{f"share_by_{name}": share for name, share in shares.items()},
        "us": round(median.wall * 1e6, 1),
        "submit_us": round(median.submit * 1e6, 1),
        "pass": all(shares[name] >= target for name, target in targets.items()),
    }
