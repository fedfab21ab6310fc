"""Speeds: write-back of the published shapes, and loads of scattered pages by every engine."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvhoist.bench.rig import STAGING_BYTES, Rig
from kvhoist.bench.shapes import Shape
from kvhoist.bench.timing import LEAD_BYTES, Arm, Lead, Peak
from kvhoist.errors import KvhoistError
from kvhoist.platform.gpu import GpuPlatform
from rocm_acceptance.target import Row, Target

QUOTAS = (2, 4, 8, 16, 32)
KINDS = ("MHA", "MLA")

_LOADS = (Shape(False, 1024, 32), Shape(False, 1024, 32, 16), Shape(True, 576, 61), Shape(True, 576, 61, 16))
_LOAD_PAGES = (4, 16, 64)
_SIMULATED = (Shape(False, 512, 16), Shape(True, 512, 16))


def published() -> dict[str, Any]:
    """Return the published figures, with where they are from."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text())
    return found


class _Measure:
    """Arms that take turns with one plain copy of as many bytes. A simulated run moves a little, once, and tells no
    speeds."""

    def __init__(self, target: Target) -> None:
        self.is_simulated = target.is_simulated
        self.platform: GpuPlatform = target.open()
        self.staging_bytes = 16 << 20 if self.is_simulated else STAGING_BYTES
        self._lead = Lead(self.platform, (1 << 16) if self.is_simulated else LEAD_BYTES)
        self._repeats, self._unmeasured = (1, 0) if self.is_simulated else (5, 2)

    def rig(self, shape: Shape, num_pages: int, block_quota: int | None = None) -> Rig:
        sizes = {"num_pages": 2 * num_pages, "staging_bytes": self.staging_bytes}
        return Rig(self.platform, shape.group, **sizes, block_quota=block_quota)

    def gib_s(self, rig: Rig, engines: Mapping[str, Any], num_pages: int, *, loads: bool) -> Row:
        """Return GiB/s of each engine and of the plain copy, medians by events; None where simulated."""
        num_bytes = num_pages * rig.group.page_bytes
        peak = Peak(self.platform, rig.host.region.address, num_bytes)
        arms = {
            name: Arm(self.platform, engine, self._lead, *rig.picked(num_pages)) for name, engine in engines.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in (*arms, "peak")}
        for turn in range(self._unmeasured + self._repeats):
            taken = {name: arm.once().events for name, arm in arms.items()}
            taken["peak"] = peak.once(upwards=loads)
            for name, one in taken.items():
                seconds[name] += [one] if turn >= self._unmeasured else []
        rates = {name: num_bytes / statistics.median(found) / (1 << 30) for name, found in seconds.items()}
        return {f"{name}_gib_s": None if self.is_simulated else round(rate, 4) for name, rate in rates.items()}


def write_back(target: Target) -> Iterator[Row]:
    """Yield a row a published shape: offloads of 64 scattered pages of 128 by `staged` and `mapped`, all bytes checked
    before. A simulated run moves one shape of each kind."""
    measure, known = _Measure(target), published()
    num_pages = 2 if target.is_simulated else known["setting"]["pages"]
    for kind in KINDS:
        for row_bytes, cells in known[kind].items():
            for layers, figures in cells.items():
                shape = Shape(kind == "MLA", int(row_bytes), int(layers))
                if target.is_simulated and shape not in _SIMULATED:
                    continue
                what = {"kind": kind, "row_bytes": int(row_bytes), "layers": int(layers)}
                what["published_gib_s"] = dict(zip(known["arms"], figures, strict=True))
                yield from _checked(what, _offloaded, measure, shape, num_pages)


def _offloaded(measure: _Measure, shape: Shape, num_pages: int) -> list[Row]:
    with measure.rig(shape, num_pages) as rig:
        engines = {name: rig.engine(name, loads=False) for name in ("staged", "mapped")}
        for name, engine in engines.items():
            rig.check(engine, rig.engine(name, loads=True))
        return [{"bytes": num_pages * rig.group.page_bytes, **measure.gib_s(rig, engines, num_pages, loads=False)}]


def loads(target: Target) -> Iterator[Row]:
    """Yield a row a shape, engine (`mapped` with every block quota) and number of scattered pages."""
    measure = _Measure(target)
    counts: Sequence[int] = (2,) if target.is_simulated else _LOAD_PAGES
    for shape in _SIMULATED if target.is_simulated else _LOADS:
        for name, quota in (("staged", None), ("dma", None), *(("mapped", quota) for quota in QUOTAS)):
            what = {"cache": str(shape), "engine": name, "block_quota": quota}
            yield from _checked(what, _loaded, measure, shape, name, quota, counts)


def _loaded(measure: _Measure, shape: Shape, name: str, quota: int | None, counts: Sequence[int]) -> list[Row]:
    with measure.rig(shape, max(counts), quota) as rig:
        engine = rig.engine(name, loads=True)
        rig.check(rig.engine(name, loads=False), engine)
        return [
            {"pages": count, "bytes": count * rig.group.page_bytes}
            | measure.gib_s(rig, {"load": engine}, count, loads=True)
            for count in counts
        ]


def _checked(what: Row, measured: Callable[..., list[Row]], *arguments: Any) -> list[Row]:
    """Return the rows that `measured` returns, whose bytes were right, or one with the error that it raised."""
    try:
        return [{**what, **row, "pass": True} for row in measured(*arguments)]
    except KvhoistError as error:
        return [{**what, "error": str(error), "pass": False}]
