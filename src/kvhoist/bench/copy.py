"""How fast the CPU platform moves scattered pages, as a share of numpy's own large-block copy in the same run.

python -m kvhoist.bench.copy [--smoke]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvhoist.bench.facts import facts
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.reference import BoundPlan
from kvhoist.device_layout import DeviceCache, read_device_layout
from kvhoist.geometry import CacheGeometry, CacheGroup
from kvhoist.memory.arena import HostArena
from kvhoist.platform.base import ByteArray

TARGET = 0.7
"""The least share of the peak that is accepted."""

_NUM_PAGES = 64
_POOL_PAGES = 2 * _NUM_PAGES

_TORCH_ALIGNMENT = 64

_PEAK_BLOCK_BYTES = 64 << 20
"""The peak copies in blocks of this many bytes: as large as a block can be before glibc's memcpy turns to non-temporal
stores, which it does by the length of one call (from 3/4 of the cache that it sees) and which pages never reach."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One cache to move pages of."""

    name: str
    group: CacheGroup
    one_tensor: bool = False  # all layers in one tensor, else a tensor a layer and component


def shapes(smoke: bool) -> list[Shape]:
    """Return the caches that are measured."""
    if smoke:
        small = CacheGeometry.attention(4, k_row_bytes=384, v_row_bytes=384, page_tokens=16)
        return [Shape("smoke, pages of 16", small.groups[0])]
    found = []
    for one_tensor in (False, True):
        how = "one tensor" if one_tensor else "a tensor a layer"
        for model, layers, row in (("SmolLM2-135M", 30, 384), ("8B GQA", 32, 2048)):
            for tokens in (16, 32, 64):
                geometry = CacheGeometry.attention(layers, k_row_bytes=row, v_row_bytes=row, page_tokens=tokens)
                found.append(Shape(f"{model}, {row} B, pages of {tokens}, {how}", geometry.groups[0], one_tensor))
        for row in (576, 1152):
            geometry = CacheGeometry.latent(61, row_bytes=row, page_tokens=64, blocks_per_page=4)
            found.append(Shape(f"MLA, {row} B, pages of 4 x 16, {how}", geometry.groups[0], one_tensor))
    return found


def run(smoke: bool = False) -> dict[str, Any]:
    """Measure offload and load of 64 scattered pages in page_first_direct for every shape and return plain data.

    Medians; copy and peak take turns. `smoke` runs one small shape in well under a second.
    """
    rows = [row for shape in shapes(smoke) for row in _measure(shape, repeats=3 if smoke else 7)]
    return {
        "bench": "copy",
        "smoke": smoke,
        **facts(),
        "peak": f"numpy copy of the same number of bytes in blocks of at most {_PEAK_BLOCK_BYTES >> 20} MiB",
        "target_share_of_peak": TARGET,
        "results": rows,
        "pass": all(row["pass"] for row in rows),
    }


def _measure(shape: Shape, repeats: int) -> list[dict[str, Any]]:
    group = shape.group
    rng = np.random.default_rng(0)
    cache = _device_cache(shape)
    with HostArena(group, num_pages=_POOL_PAGES, first_touch_threads=1) as arena:
        arena.buffer[:] = 1
        pages = rng.permutation(_POOL_PAGES)[:_NUM_PAGES]
        blocks = rng.permutation(cache.num_blocks)[: _NUM_PAGES * group.blocks_per_page]
        offload = CopyPlan.make(cache.layout, arena.layout)
        load = CopyPlan.make(arena.layout, cache.layout)
        peak_arrays = (
            np.ones(_NUM_PAGES * group.page_bytes, np.uint8),
            np.ones(_NUM_PAGES * group.page_bytes, np.uint8),
        )
        arms: dict[str, Callable[[], object]] = {
            "peak": lambda: _peak(*peak_arrays),
            "one_block": lambda: np.copyto(*peak_arrays),
            "offload": partial(BoundPlan(offload, cache.buffers, [arena.region]).copy, blocks, pages),
            "load": partial(BoundPlan(load, [arena.region], cache.buffers).copy, pages, blocks),
        }
        seconds = _times(arms, repeats)
        arms.clear()
    return [_row(shape, direction, plan, seconds) for direction, plan in (("offload", offload), ("load", load))]


def _row(shape: Shape, direction: str, plan: CopyPlan, seconds: dict[str, list[float]]) -> dict[str, Any]:
    num_bytes = _NUM_PAGES * shape.group.page_bytes
    median = {name: statistics.median(times) for name, times in seconds.items()}
    share = statistics.median(p / t for p, t in zip(seconds["peak"], seconds[direction], strict=True))
    return {
        "shape": shape.name,
        "direction": direction,
        "bytes": num_bytes,
        "runs_per_page": plan.num_runs,
        "run_bytes": plan.min_run_bytes,
        "engine": "reference",
        "us": round(median[direction] * 1e6, 1),
        "gib_s": round(num_bytes / median[direction] / (1 << 30), 2),
        "peak_gib_s": round(num_bytes / median["peak"] / (1 << 30), 2),
        "one_block_gib_s": round(num_bytes / median["one_block"] / (1 << 30), 2),
        "share_of_peak": round(share, 3),
        "pass": share >= TARGET,
    }


def _times(arms: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):  # the first warms caches and page tables
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _peak(dst: ByteArray, src: ByteArray) -> None:
    for start in range(0, len(dst), _PEAK_BLOCK_BYTES):
        np.copyto(dst[start : start + _PEAK_BLOCK_BYTES], src[start : start + _PEAK_BLOCK_BYTES])


def _device_cache(shape: Shape) -> DeviceCache:
    """Return a layer-first cache of whole pages: [slots, row bytes] a layer."""
    group = shape.group
    slots = _POOL_PAGES * group.page_tokens
    if shape.one_tensor:
        tensors: dict[str, Any] = {c.name: _filled(len(c.layers), slots, c.row_bytes) for c in group.components}
        return read_device_layout(group, tensors, "layer slot dim")
    tensors = {c.name: [_filled(slots, c.row_bytes) for _ in c.layers] for c in group.components}
    return read_device_layout(group, tensors, "slot dim")


def _filled(*shape: int) -> ByteArray:
    """Return an array at a multiple of 64 bytes, as torch allocates. numpy's own multiples of 16 would meet a fault of
    AMD Zen 3, whose `rep movsb` falls to a fifth where the destination stands 1 to 31 bytes after the source, modulo
    4096 (measured here; host pages stand at 0)."""
    num_bytes = int(np.prod(shape))
    raw = np.ones(num_bytes + _TORCH_ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % _TORCH_ALIGNMENT
    return raw[start : start + num_bytes].reshape(shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one small shape")
    print(json.dumps(run(smoke=parser.parse_args().smoke), indent=2))


if __name__ == "__main__":
    main()
