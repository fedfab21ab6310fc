"""The relayout kernel, run on the CPU as it stands, against the numpy oracle."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kernel_shim
import numpy as np
import pytest

from kvhoist.copy.nests import End, Nest
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.reference import BoundPlan
from kvhoist.copy.relayout import SOURCE, Relayout, word_bytes_of
from kvhoist.copy.rounds import WORDS
from kvhoist.device_layout import read_device_layout
from kvhoist.errors import ConfigError
from kvhoist.geometry import CacheGeometry, CacheGroup
from kvhoist.layout import HostOrder
from kvhoist.memory.arena import HostArena
from kvhoist.messages import LEFT_OUT
from kvhoist.platform.base import region_of
from kvhoist.platform.cpu import CpuPlatform, CpuStream

pytestmark = pytest.mark.skipif(kernel_shim.compiler() is None, reason="no C++ compiler here")


class ShimModule:
    """A module whose kernels run at once, in the calling thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def prepare(self, kernel: str, parameters: ctypes.Structure) -> ShimCall:
        return ShimCall(self.library, int(kernel.removeprefix("relayout")), parameters)


class ShimCall:
    def __init__(self, library: ctypes.CDLL, word: int, parameters: Any) -> None:
        self.library, self.word, self.parameters = library, word, parameters

    def launch(self, grid: int, block: int, stream: object) -> None:
        kernel_shim.run(self.library, self.word, self.parameters, grid, block)


@pytest.fixture(scope="module", params=["nvidia", "amd"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    rocm = request.param == "amd"
    if kernel_shim.compiler(rocm=rocm) is None:
        pytest.skip("no ziglang here: pip install ziglang")
    return kernel_shim.build(tmp_path_factory.mktemp("kernel"), rocm=rocm)


def attention(k: int, v: int, bpp: int) -> CacheGroup:
    geometry = CacheGeometry.attention(3, k_row_bytes=k, v_row_bytes=v, page_tokens=16 * bpp, blocks_per_page=bpp)
    return geometry.groups[0]


CASES: dict[str, tuple[CacheGroup, str, Any]] = {
    "whole pages": (attention(64, 64, 1), "slot dim", lambda row: (-16, row)),
    "blocks": (attention(96, 32, 4), "block token dim", lambda row: (-1, 16, row)),
    "heads first": (attention(96, 96, 2), "block head token dim", lambda row: (-1, 4, 16, row // 4)),
    "rows of 4": (attention(4, 0, 2), "block token dim", lambda row: (-1, 16, row)),
    "latent 576": (
        CacheGeometry.latent(3, row_bytes=576, page_tokens=64, blocks_per_page=4, index_row_bytes=132).groups[0],
        "block token dim",
        lambda row: (-1, 16, row),
    ),
    "a word short of a piece": (attention(255, 0, 2), "block token dim", lambda row: (-1, 16, row)),
    "long runs": (attention(8192 + 16, 0, 2), "block token dim", lambda row: (-1, 16, row)),
}


def moved(library: ctypes.CDLL, case: str, order: HostOrder, *, scatters: bool, grid: int, left_out: bool) -> bool:
    """Move 5 pages between a host blob (as the ring holds it) and a cache, by kernel and oracle; tell whether all bytes
    of both are the same."""
    group, axes, shape_of = CASES[case]
    rng = np.random.default_rng(0)
    num_pages, per_page = 5, group.blocks_per_page
    num_blocks = 8 * per_page
    sizes = {c.name: [abs(n) * (num_blocks if n < 0 else 1) for n in shape_of(c.row_bytes)] for c in group.components}
    tensors = {c.name: [_random(rng, sizes[c.name]) for _ in c.layers] for c in group.components}
    twins = {name: [tensor.copy() for tensor in held] for name, held in tensors.items()}
    cache, twin = (read_device_layout(group, held, axes) for held in (tensors, twins))
    blobs, wanted = (HostArena(group, num_pages=num_pages + 1, order=order) for _ in range(2))
    blobs.buffer[:] = wanted.buffer[:] = rng.integers(0, 256, blobs.num_bytes, dtype=np.uint8)
    blocks = rng.permutation(cache.layout.num_units)[: num_pages * per_page].astype(np.int64)
    if left_out:
        blocks[1] = LEFT_OUT
    host_ends = (blobs.layout, cache.layout) if scatters else (cache.layout, blobs.layout)
    plan = CopyPlan.make(*host_ends)
    pages = np.arange(num_pages)
    if scatters:
        BoundPlan(CopyPlan.make(wanted.layout, twin.layout), (wanted.region,), twin.buffers).copy(pages, blocks)
    else:
        BoundPlan(CopyPlan.make(twin.layout, wanted.layout), twin.buffers, (wanted.region,)).copy(blocks, pages)
    nests = [_placed(nest, cache.buffers, scatters=scatters) for nest in plan.nests]
    relayout = Relayout(
        nests,
        ShimModule(library),
        CpuPlatform(),
        word_bytes=word_bytes_of(nests),
        scatters=scatters,
        steps_per_page=plan.steps_per_page,
        steps_per_id=plan.steps_per_page // per_page,
        block_threads=256,
        max_blocks=grid,
    )
    slot = region_of(blobs.buffer).address
    ids = region_of(blocks.view(np.uint8)).address
    relayout.launch(slot, 0, ids, num_pages * plan.steps_per_page, CpuStream())
    same = all((a == b).all() for name in tensors for a, b in zip(tensors[name], twins[name], strict=True))
    return same and bool((blobs.buffer == wanted.buffer).all())


def _random(rng: np.random.Generator, shape: list[int]) -> Any:
    """Return random bytes with room behind them, which a faulty kernel may overwrite."""
    num_bytes = int(np.prod(shape))
    return rng.integers(0, 256, num_bytes + 4096, dtype=np.uint8)[:num_bytes].reshape(shape)


def _placed(nest: Nest, buffers: Sequence[Any], *, scatters: bool) -> Nest:
    def at(end: End) -> End:
        address = end.offset_bytes + buffers[end.buffer].address
        return End(0, address, end.unit_stride_bytes, end.block_stride_bytes)

    src, dst = (nest.src, at(nest.dst)) if scatters else (at(nest.src), nest.dst)
    return Nest(src, dst, nest.run_bytes, nest.axes)


@pytest.mark.parametrize("order", [HostOrder.PAGE_FIRST_DIRECT, HostOrder.PAGE_FIRST])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_moves_what_the_oracle_moves(library: ctypes.CDLL, case: str, order: HostOrder) -> None:
    for scatters in (True, False):
        for grid in (1, 7):
            if case != "a word short of a piece" or order is HostOrder.PAGE_FIRST_DIRECT:  # else rows of 255 bytes
                assert moved(library, case, order, scatters=scatters, grid=grid, left_out=False)


def test_a_block_left_out_is_not_written(library: ctypes.CDLL) -> None:
    assert moved(library, "blocks", HostOrder.PAGE_FIRST_DIRECT, scatters=True, grid=3, left_out=True)


@pytest.mark.parametrize("rocm", [False, True], ids=["nvidia", "amd"])
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("k < run_words", "k <= run_words"),
        ("k < run_words", "k + 1 < run_words"),
        ("<= run_words)", "<= run_words + 1)"),
        ("(step - unit * side.per_unit) * side.block_stride", "0"),
    ],
)
def test_a_planted_fault_of_the_kernel_is_noticed(tmp_path: Path, right: str, wrong: str, rocm: bool) -> None:
    if kernel_shim.compiler(rocm=rocm) is None:
        pytest.skip("no ziglang here: pip install ziglang")
    text = SOURCE.read_text()
    assert text.count(right) == 1
    faulty = kernel_shim.build(tmp_path, text.replace(right, wrong), rocm=rocm)
    found = [
        moved(faulty, case, HostOrder.PAGE_FIRST_DIRECT, scatters=False, grid=3, left_out=False)
        for case in ("heads first", "latent 576", "blocks", "a word short of a piece")
    ]
    assert not all(found)


def test_words_are_as_wide_as_every_address_and_run_allows() -> None:
    end = End(0, 64, 4096)
    for run, word in ((48, 16), (40, 8), (36, 4)):
        assert word_bytes_of([Nest(end, end, run)]) == word
    for far, run in ((end, 34), (End(0, 66, 4096), 48)):
        with pytest.raises(ConfigError, match=r"aligned to 2 B.*Set io_backend to 'dma'"):
            word_bytes_of([Nest(end, far, run)])
    assert WORDS == (16, 8, 4)
