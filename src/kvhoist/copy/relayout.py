"""Launches of the relayout kernel for one plan: gather into staging, or scatter out of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64
from importlib import resources

import numpy as np

from kvhoist.copy.nests import Axis, End, Nest
from kvhoist.copy.rounds import GROUP_THREADS, MAX_LOOPS, SERVED, CopyRounds, refusal_of, rounds_of
from kvhoist.errors import ConfigError
from kvhoist.platform.base import IdArray, KernelCall, Module, Platform, Stream

NAME = "relayout.cuh"
SOURCE = resources.files("kvhoist.copy").joinpath(f"kernels/{NAME}")


class SideParameters(ctypes.Structure):
    """struct Side of relayout.cuh."""

    _fields_ = (
        ("base", c_int64),
        ("unit_stride", c_int64),
        ("block_stride", c_int64),
        ("stride", c_int64 * MAX_LOOPS),
        ("ids", c_int64),
        ("per_unit", c_int64),
    )


class RelayoutParameters(ctypes.Structure):
    """struct Relayout of relayout.cuh."""

    _fields_ = (
        ("src", SideParameters),
        ("dst", SideParameters),
        ("places", c_int64),
        ("num_places", c_int64),
        ("num_steps", c_int64),
        ("run_bytes", c_int64),
        ("length", c_int64 * MAX_LOOPS),
    )


class Relayout:
    """The nests of one plan, those of one shape in one launch, their places in device memory. One side is the host's
    pages, staged or mapped, the other the cache. For one thread at a time."""

    def __init__(
        self,
        nests: Sequence[Nest],
        module: Module,
        platform: Platform,
        *,
        word_bytes: int,
        scatters: bool,
        steps_per_page: int,
        steps_per_id: int,
        block_threads: int,
        max_blocks: int,
    ) -> None:
        """`nests` hold addresses for offsets on the cache's side; words of `word_bytes` must divide all their numbers.
        `scatters`: from the pages to the cache. A page is `steps_per_page` steps, an id of the cache `steps_per_id`."""
        table = _pack_places(nests)
        self._places = platform.allocate(table.nbytes)
        platform.write(self._places, table.view(np.uint8).reshape(-1))
        self._block_threads = block_threads
        self._max_blocks = max_blocks
        self._launches: list[tuple[KernelCall, RelayoutParameters, SideParameters, SideParameters, int]] = []
        first = 0
        for group in _alike(nests):
            nest = group[0]
            axes = (*((1, 0, 0),) * (MAX_LOOPS - len(nest.axes)), *nest.axes)
            per_unit = (steps_per_page, steps_per_id) if scatters else (steps_per_id, steps_per_page)
            parameters = RelayoutParameters(
                _side(nest.src, [axis[1] for axis in axes], per_unit[0]),
                _side(nest.dst, [axis[2] for axis in axes], per_unit[1]),
                self._places.address + first * 16,
                len(group),
                0,
                nest.run_bytes,
                (c_int64 * MAX_LOOPS)(*(axis[0] for axis in axes)),
            )
            pieces = CopyRounds(word_bytes).pieces_of(nest.run_bytes)
            pages, cache = (parameters.src, parameters.dst) if scatters else (parameters.dst, parameters.src)
            call = module.prepare(f"relayout{word_bytes}", parameters)
            self._launches.append((call, parameters, pages, cache, len(group) * nest.num_runs * pieces))
            first += len(group)

    def launch(self, base: int, page_ids: int, cache_ids: int, num_steps: int, stream: Stream) -> None:
        """Enqueue `num_steps` steps between the pages at `base` and the cache. Ids stand at the given addresses, where
        the device can read them; `page_ids` 0: pages are counted from 0 on."""
        for call, parameters, pages, cache, items in self._launches:
            pages.base, pages.ids, cache.ids, parameters.num_steps = base, page_ids, cache_ids, num_steps
            groups = -(-items * num_steps * GROUP_THREADS // self._block_threads)
            call.launch(min(self._max_blocks, groups), self._block_threads, stream)


def _pack_places(nests: Sequence[Nest]) -> IdArray:
    """Return the source and destination offsets of `nests`, in the order in which `Relayout` wants them."""
    ordered = [nest for group in _alike(nests) for nest in group]
    return np.array([[nest.src.offset_bytes, nest.dst.offset_bytes] for nest in ordered], dtype=np.int64)


def word_bytes_of(nests: Sequence[Nest]) -> int:
    """Return the widest word that all addresses and runs are multiples of. Raises ConfigError where the kernel cannot
    move them."""
    rounds = rounds_of(nests)
    if rounds is None:
        raise ConfigError(
            "the kernels cannot move these rows",
            got=refusal_of(nests),
            expected=SERVED,
            remedy="Set io_backend to 'dma'.",
        )
    return rounds.word_bytes


def _alike(nests: Sequence[Nest]) -> list[list[Nest]]:
    groups: dict[tuple[int, tuple[Axis, ...], int, int, int, int], list[Nest]] = {}
    for nest in nests:
        a, b = nest.src, nest.dst
        strides = (a.unit_stride_bytes, a.block_stride_bytes, b.unit_stride_bytes, b.block_stride_bytes)
        groups.setdefault((nest.run_bytes, nest.axes, *strides), []).append(nest)
    return list(groups.values())


def _side(end: End, strides: list[int], per_unit: int) -> SideParameters:
    return SideParameters(
        0, end.unit_stride_bytes, end.block_stride_bytes, (c_int64 * MAX_LOOPS)(*strides), 0, per_unit
    )
