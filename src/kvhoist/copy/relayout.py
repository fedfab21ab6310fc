"""Launches of the relayout kernel for one plan: gather into staging, or scatter out of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64
from importlib import resources

import numpy as np

from kvhoist.copy.nests import Axis, End, Nest
from kvhoist.platform.base import IdArray, KernelCall, MemoryRegion, Module, Stream

NAME = "relayout.cuh"
SOURCE = resources.files("kvhoist.copy").joinpath(f"kernels/{NAME}")

GROUP_THREADS = 32
UNROLL = 8
DEFINES = {"GROUP_THREADS": GROUP_THREADS, "UNROLL": UNROLL}
BLOCK_THREADS = 256
MAX_AXES = 4
WORDS = (16, 8, 4)
"""Bytes that a thread moves at once: the kernels are called relayout16, relayout8 and relayout4."""


class SideParameters(ctypes.Structure):
    """struct Side of relayout.cuh."""

    _fields_ = (
        ("base", c_int64),
        ("unit_stride", c_int64),
        ("block_stride", c_int64),
        ("stride", c_int64 * MAX_AXES),
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
        ("length", c_int64 * MAX_AXES),
    )


class Relayout:
    """The nests of one plan, those of one shape in one launch, their places in device memory. One side is the staging
    ring, whose units are counted from 0 on, the other the cache, whose units are named by ids. For one thread at a
    time."""

    def __init__(
        self,
        nests: Sequence[Nest],
        module: Module,
        places: MemoryRegion,
        *,
        word_bytes: int,
        scatters: bool,
        steps_per_page: int,
        steps_per_id: int,
        max_blocks: int,
    ) -> None:
        """`nests` hold addresses for offsets on the cache's side, `places` what `pack_places(nests)` returned, on the
        device. `scatters`: from the ring to the cache."""
        self._places = places  # kept alive
        self._max_blocks = max_blocks
        self._launches: list[tuple[KernelCall, RelayoutParameters, SideParameters, SideParameters, int]] = []
        first = 0
        for group in _alike(nests):
            nest = group[0]
            axes = (*((1, 0, 0),) * (MAX_AXES - len(nest.axes)), *nest.axes)
            per_unit = (steps_per_page, steps_per_id) if scatters else (steps_per_id, steps_per_page)
            parameters = RelayoutParameters(
                _side(nest.src, [axis[1] for axis in axes], per_unit[0]),
                _side(nest.dst, [axis[2] for axis in axes], per_unit[1]),
                places.address + first * 16,
                len(group),
                0,
                nest.run_bytes,
                (c_int64 * MAX_AXES)(*(axis[0] for axis in axes)),
            )
            pieces = -(-nest.run_bytes // (word_bytes * GROUP_THREADS * UNROLL))
            staged, cache = (parameters.src, parameters.dst) if scatters else (parameters.dst, parameters.src)
            call = module.prepare(f"relayout{word_bytes}", parameters)
            self._launches.append((call, parameters, staged, cache, len(group) * nest.num_runs * pieces))
            first += len(group)

    def launch(self, slot: int, ids: int, num_steps: int, stream: Stream) -> None:
        """Enqueue `num_steps` steps between the ring's slot at `slot` and the units whose ids stand at `ids`."""
        for call, parameters, staged, cache, items in self._launches:
            staged.base, cache.ids, parameters.num_steps = slot, ids, num_steps
            groups = -(-items * num_steps * GROUP_THREADS // BLOCK_THREADS)
            call.launch(min(self._max_blocks, groups), BLOCK_THREADS, stream)


def pack_places(nests: Sequence[Nest]) -> IdArray:
    """Return the source and destination offsets of `nests`, in the order in which `Relayout` wants them."""
    ordered = [nest for group in _alike(nests) for nest in group]
    return np.array([[nest.src.offset_bytes, nest.dst.offset_bytes] for nest in ordered], dtype=np.int64)


def word_bytes_of(nests: Sequence[Nest]) -> int | None:
    """Return the widest word that all addresses and runs are multiples of; None where the kernel cannot move them."""
    if any(len(nest.axes) > MAX_AXES for nest in nests):
        return None
    return next((word for word in WORDS if all(n % word == 0 for nest in nests for n in nest.numbers())), None)


def _alike(nests: Sequence[Nest]) -> list[list[Nest]]:
    groups: dict[tuple[int, tuple[Axis, ...], int, int, int, int], list[Nest]] = {}
    for nest in nests:
        a, b = nest.src, nest.dst
        strides = (a.unit_stride_bytes, a.block_stride_bytes, b.unit_stride_bytes, b.block_stride_bytes)
        groups.setdefault((nest.run_bytes, nest.axes, *strides), []).append(nest)
    return list(groups.values())


def _side(end: End, strides: list[int], per_unit: int) -> SideParameters:
    return SideParameters(0, end.unit_stride_bytes, end.block_stride_bytes, (c_int64 * MAX_AXES)(*strides), 0, per_unit)
