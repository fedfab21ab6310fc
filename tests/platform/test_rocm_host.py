"""Host memory that AMD's driver owns: asked for by one value of one variable, exact, freed with the last view."""

from __future__ import annotations

import errno
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_rank import ENGINES, SMALL, move_around_capacity, ring_of
from hip_rank import HipRank

from kvhoist.errors import ConfigError, HostMemoryError
from kvhoist.memory.arena import HostArena
from kvhoist.memory.pinned import PinnedArena
from kvhoist.platform import rocm_host
from kvhoist.platform.rocm import RocmPlatform

VARIABLE = "HSA_USERPTR_FOR_PAGED_MEM"


@pytest.fixture
def driver_owned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that started with the variable: its pages have no node to tell."""
    monkeypatch.setenv(VARIABLE, "0")
    monkeypatch.setattr(rocm_host, "may_move", lambda address: False)


@pytest.mark.parametrize("value", [None, "", "1", "false", "00"])
def test_without_the_one_value_memory_is_registered_as_ever(
    platform: RocmPlatform, hip: Any, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    before = hip.calls("hipHostMalloc")
    with HostArena(SMALL.group, num_pages=3, allocate=platform.allocate_host) as arena, PinnedArena(arena, platform):
        assert hip.live()["registrations"] == 1
    assert hip.calls("hipHostMalloc") == before


def test_driver_owned_memory_is_exact_never_registered_and_freed_with_its_last_view(
    platform: RocmPlatform, hip: Any, driver_owned: None
) -> None:
    registered, unregistered = hip.calls("hipHostRegister"), hip.calls("hipHostUnregister")
    arena = HostArena(SMALL.group, num_pages=5, allocate=platform.allocate_host, first_touch_threads=2)
    assert arena.num_bytes == arena.buffer.nbytes == 5 * 4096
    with PinnedArena(arena, platform, piece_bytes=2 * 4096) as pinned:
        assert pinned.num_pieces == 3
        addresses = pinned.device_addresses(np.arange(5))
        assert (np.diff(addresses) == 4096).all()
        assert addresses[0] != arena.region.address
    del pinned
    view = arena.page(2)
    arena.close()
    assert (hip.live()["host allocations"], arena.held_bytes) == (1, 5 * 4096)
    view[0] = 1
    view.release()
    del view
    gc.collect()
    assert ("host allocations" in hip.live(), arena.held_bytes) == (False, 0)
    assert (hip.calls("hipHostRegister"), hip.calls("hipHostUnregister")) == (registered, unregistered)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_moves_what_the_oracle_moves_between_it_and_the_device(
    hip: Any, driver_owned: None, engine: str
) -> None:
    registered = hip.calls("hipHostRegister")
    options = {"io_backend": engine, "staging_bytes": ring_of(SMALL)}
    with HipRank(SMALL, num_blocks=32, host_pages=12, **options) as rank:
        move_around_capacity(rank, (1, 2, 3, 7))
    with HipRank(SMALL, num_blocks=32, host_pages=12, debug_verify=True, **options):
        assert hip.calls("hipHostRegister") == registered, "pages that may move stop the device whatever is in them"


def test_too_little_of_it_says_how_much_and_who_shares_it(platform: RocmPlatform, hip: Any, driver_owned: None) -> None:
    hip.fail("hipHostMalloc")
    wanted = r"which all ranks of a node share.*hipErrorOutOfMemory.*20480 bytes.*mem_info_gtt_total.*Lower host_bytes"
    with pytest.raises(HostMemoryError, match=wanted):
        HostArena(SMALL.group, num_pages=5, allocate=platform.allocate_host)
    assert hip.last_error() == 0


def test_the_variable_set_too_late_is_refused(
    platform: RocmPlatform, hip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulated runtime's pages are ordinary ones, as those of a runtime that had started without the variable."""
    monkeypatch.setenv(VARIABLE, "0")
    with pytest.raises(ConfigError, match=r"set after the HIP runtime had started.*HSA_USERPTR_FOR_PAGED_MEM=0"):
        platform.allocate_host(8192)
    gc.collect()
    assert hip.live() == {}


def test_pages_that_could_move_are_told_from_others(
    pinned: np.ndarray, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pinned[:] = 1
    assert rocm_host.may_move(pinned.ctypes.data)
    monkeypatch.setattr(rocm_host, "page_nodes", lambda pages: [-errno.EFAULT for _ in pages])
    assert not rocm_host.may_move(pinned.ctypes.data)

    def refuse(pages: list[int]) -> list[int]:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(rocm_host, "page_nodes", refuse)
    assert not rocm_host.may_move(pinned.ctypes.data)
    assert "Operation not permitted" in caplog.text


def test_the_total_is_read_where_the_driver_tells_it(tmp_path: Path) -> None:
    folder = tmp_path / "card1/device"
    folder.mkdir(parents=True)
    (folder / "mem_info_gtt_total").write_text(f"{64 << 30}\n")
    assert rocm_host._gtt_total(tmp_path).startswith("64.0 GiB")
