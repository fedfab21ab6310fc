"""The rig of the copy benches: whoever is measured on it has its bytes compared first."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from kvhoist.bench.rig import Rig
from kvhoist.bench.shapes import SMOKE
from kvhoist.copy.engine import Between, Started
from kvhoist.copy.reference import BoundPlan
from kvhoist.errors import ConfigError, KvhoistError
from kvhoist.platform.base import Event, IdArray, Stream
from kvhoist.platform.cpu import CpuPlatform


class Theirs:
    """Somebody's engine; a faulty one leaves out the last page of a load."""

    def __init__(self, between: Between, *, faulty: bool) -> None:
        self.between = between
        self.streams: tuple[Stream, ...] = ()
        self._faulty = faulty
        ends = ((between.host.region,), between.device)
        self._bound = BoundPlan(between.plan, *(ends if between.loads else ends[::-1]))

    def start(self, pages: IdArray, blocks: IdArray, after: Event | None) -> Started:
        count = len(pages) - (self._faulty and self.between.loads)
        ids = (pages[:count], blocks[: count * self.between.ids_per_page])
        self._bound.copy(*(ids if self.between.loads else ids[::-1]))
        event = self.between.platform.make_event()
        return Started([(1, event)], event)

    def synchronize(self) -> None:
        return


@pytest.fixture(autouse=True)
def theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("theirs")
    module.right = lambda between: Theirs(between, faulty=False)  # type: ignore[attr-defined]
    module.wrong = lambda between: Theirs(between, faulty=True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "theirs", module)


@pytest.mark.parametrize("shape", SMOKE, ids=str)
@pytest.mark.parametrize("name", ["reference", "theirs:right"])
def test_an_engine_that_moves_the_bytes_passes(shape: object, name: str) -> None:
    with Rig(CpuPlatform(), shape.group, num_pages=6) as rig:  # type: ignore[attr-defined]
        rig.check(rig.engine(name, loads=False), rig.engine(name, loads=True))
        assert np.unique(rig.pages).tolist() == list(range(6))


def test_one_that_does_not_is_told() -> None:
    with (
        Rig(CpuPlatform(), SMOKE[0].group, num_pages=6) as rig,
        pytest.raises(KvhoistError, match="came back from the device with other bytes"),
    ):
        rig.check(rig.engine("reference", loads=False), rig.engine("theirs:wrong", loads=True))


@pytest.mark.parametrize("name", ["theirs:none", "no_such_module:make", ":make"])
def test_one_that_is_not_there_is_refused(name: str) -> None:
    with Rig(CpuPlatform(), SMOKE[0].group, num_pages=2) as rig, pytest.raises(ConfigError, match="module:function"):
        rig.engine(name, loads=True)
