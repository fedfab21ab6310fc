"""KV caches as vLLM's backends make them, over plain bytes: views whose axes have names, a physical order and gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvhoist.adapters.vllm.caches import RegisteredCaches, read_kv_caches
from kvhoist.copy.plan import CopyPlan
from kvhoist.copy.reference import copy
from kvhoist.layout import HostOrder, host_layout
from kvhoist.platform.base import regions_of

GUARD_BYTES = 64

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Spec:
    """Layers that hold their blocks alike.

    `axes` are the tensor's, outermost first, with their lengths; `block` counts vLLM's blocks, other names are free.
    `order` names the same axes in memory, `layer` among them, outermost first. `ratio` kernel blocks stand for one of
    vLLM's: the `block` axis gets longer, `axes` are a kernel block's. `gaps` are bytes left unused after each step of
    an axis, `offset_bytes` are before the first layer.
    """

    axes: Mapping[str, int]
    order: str
    dtype: str = "bfloat16"
    layers: Sequence[str] = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
    ratio: int = 1
    gaps: Mapping[str, int] = field(default_factory=dict)
    offset_bytes: int = 0
    backend: str = "BACKEND"

    @property
    def item_bytes(self) -> int:
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def block_dim(self) -> int:
        return list(self.axes).index("block")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(length * (self.ratio if name == "block" else 1) for name, length in self.axes.items())

    @cached_property
    def strides(self) -> dict[str, int]:
        """Bytes from one to the next along each axis, layer included."""
        lengths = dict(zip(self.axes, self.shape, strict=True)) | {"layer": len(self.layers)}
        strides, extent = {}, self.item_bytes
        for name in reversed(self.order.split()):
            strides[name] = extent + self.gaps.get(name, 0)
            extent = strides[name] * lengths[name]
        return strides

    @property
    def num_bytes(self) -> int:
        outermost = self.order.split()[0]
        lengths = dict(zip(self.axes, self.shape, strict=True)) | {"layer": len(self.layers)}
        return self.strides[outermost] * lengths[outermost]

    def rows_of(self, content: NDArray[Any]) -> list[bytes]:
        """Return what a host page must hold for one block (`content` as of `Memory.block`): its bytes in the order in
        which they lie on the device, K's and V's apart where planes of blocks are."""
        inner = [name for name in self.order.split() if name not in ("layer", self.plane_axis)]
        names = list(self.axes)
        if self.plane_axis is None:
            return [content.transpose([names.index(name) for name in inner]).tobytes()]
        planes = np.moveaxis(content, names.index(self.plane_axis), 0)
        names.remove(self.plane_axis)
        return [plane.transpose([names.index(name) for name in inner]).tobytes() for plane in planes]

    @property
    def plane_axis(self) -> str | None:
        """The axis of K and V where each has a plane of its own: one of two, before the blocks and around them."""
        before = list(self.axes)[: self.block_dim]
        planes = [name for name in before if self.axes[name] == 2 and self.strides[name] > self.strides["block"]]
        return planes[0] if planes else None

    @property
    def block_bytes(self) -> int:
        """Bytes of one of vLLM's blocks in one layer, gaps left out."""
        return prod(length for name, length in self.axes.items() if name != "block") * self.ratio * self.item_bytes


class Memory:
    """The bytes of some specs' tensors, one allocation each (or one for all, `shared`), random, guard bytes around."""

    def __init__(self, specs: Sequence[Spec], seed: int, *, shared: bool = False) -> None:
        rng = np.random.default_rng(seed)
        sizes = [spec.offset_bytes + spec.num_bytes for spec in specs]
        self.specs = specs
        self.raws: list[Bytes] = [
            rng.integers(0, 256, n + 2 * GUARD_BYTES, dtype=np.uint8) for n in ([max(sizes)] if shared else sizes)
        ]
        self._places = [
            (self.raws[0 if shared else i], GUARD_BYTES + spec.offset_bytes, spec) for i, spec in enumerate(specs)
        ]

    def copy(self) -> Memory:
        """Return another memory with the same bytes."""
        twin = Memory(self.specs, 0, shared=len(self.raws) < len(self.specs))
        for raw, source in zip(twin.raws, self.raws, strict=True):
            raw[:] = source
        return twin

    def views(self) -> dict[str, NDArray[Any]]:
        """Return each layer's tensor as unsigned integers, over the same bytes."""
        return {
            name: np.ndarray(
                spec.shape,
                np.dtype(f"u{spec.item_bytes}"),
                raw,
                start + i * spec.strides["layer"],
                tuple(spec.strides[axis] for axis in spec.axes),
            )
            for raw, start, spec in self._places
            for i, name in enumerate(spec.layers)
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what vLLM registers, over the same bytes."""
        return {
            name: torch.from_numpy(raw)
            .view(getattr(torch, spec.dtype))
            .as_strided(
                spec.shape,
                [spec.strides[axis] // spec.item_bytes for axis in spec.axes],
                (start + i * spec.strides["layer"]) // spec.item_bytes,
            )
            for raw, start, spec in self._places
            for i, name in enumerate(spec.layers)
        }

    def spec_of(self, layer: str) -> Spec:
        return next(spec for spec in self.specs if layer in spec.layers)

    def block(self, layer: str, block: int) -> NDArray[Any]:
        """Return the elements of one of vLLM's blocks, seen through the tensor's axes; may be written."""
        spec = self.spec_of(layer)
        where = [slice(None)] * len(spec.axes)
        where[spec.block_dim] = slice(block * spec.ratio, (block + 1) * spec.ratio)
        return self.views()[layer][tuple(where)]


def index_of(name: str) -> int:
    return int(next(part for part in name.split(".") if part.isdigit()))


def read(
    memory: Memory, kv_caches: Mapping[str, Any] | None = None, *, block_tokens: int, blocks_per_page: int = 1
) -> RegisteredCaches:
    layers = [name for spec in memory.specs for name in spec.layers]
    return read_kv_caches(
        memory.tensors() if kv_caches is None else kv_caches,
        layers,
        index_of,
        num_blocks=memory.specs[0].axes["block"],
        block_tokens=block_tokens,
        blocks_per_page=blocks_per_page,
        block_dim=lambda name, tensor: memory.spec_of(name).block_dim,
        backend_of=lambda name: memory.spec_of(name).backend,
    )


def move_out(caches: RegisteredCaches, blocks: Sequence[int], order: HostOrder) -> tuple[Any, Bytes]:
    """Copy `blocks` to host pages 0, 1, ... and return the host's layout and bytes, zero where nothing was written."""
    host = host_layout(caches.group, len(blocks) // caches.group.blocks_per_page, order)
    array = np.zeros(host.buffer_bytes[0], np.uint8)
    plan = CopyPlan.make(caches.device.layout, host)
    moved = copy(plan, caches.device.buffers, blocks, regions_of([array]), range(host.num_units))
    assert moved == host.num_units * caches.group.page_bytes
    return host, array


def move_in(caches: RegisteredCaches, host: Any, array: Bytes, blocks: Sequence[int]) -> None:
    plan = CopyPlan.make(host, caches.device.layout)
    copy(plan, regions_of([array]), range(host.num_units), caches.device.buffers, blocks)


def check_round_trip(
    memory: Memory, caches: RegisteredCaches, out: Sequence[int], into: Sequence[int], layers: Sequence[str],
    order: HostOrder = HostOrder.PAGE_FIRST_DIRECT,
) -> None:  # fmt: skip
    """Move the blocks `out` to the host and back into the blocks `into`; every byte of the memory must then be what
    assigning block by block through the tensors' own axes gives."""
    before = memory.copy()
    host, array = move_out(caches, out, order)
    assert same(memory, before), "moving out wrote to the device"
    expected = memory.copy()
    for layer in layers:
        for source, target in zip(out, into, strict=True):
            expected.block(layer, target)[...] = before.block(layer, source)
    move_in(caches, host, array, into)
    assert same(memory, expected)


def same(a: Memory, b: Memory) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a.raws, b.raws, strict=True))


def host_page(
    memory: Memory, caches: RegisteredCaches, owners: Mapping[str, Sequence[str]], blocks: Sequence[int]
) -> bytes:
    """Return what a `page_first_direct` page of `blocks` must be, from the tensors' own axes: layer by layer, component
    by component, block by block. `owners` are the layers of each component, as the test knows them."""
    page = b""
    for index in caches.group.layers:
        for component in caches.group.components:
            for layer in owners[component.name]:
                if index_of(layer) == index:
                    plane = 1 if component.name.split(".")[0] == "v" else 0
                    page += b"".join(
                        memory.spec_of(layer).rows_of(memory.block(layer, block))[plane] for block in blocks
                    )
    return page
