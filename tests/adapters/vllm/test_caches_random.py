"""Random layouts, as strange as strides allow: moved byte for byte, or refused where a block is in no regular order."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st
from vllm_cache_views import Memory, Spec, check_round_trip, host_page, move_out, read

from kvhoist.errors import LayoutError
from kvhoist.layout import HostOrder

LAYERS = tuple(f"model.layers.{i}.self_attn.attn" for i in (0, 2, 3))
DTYPES = ("uint8", "int8", "float8_e4m3fn", "float16", "bfloat16", "float32", "uint64")


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int]:
    """The axes of a tensor in any order, K and V before or after the blocks or not at all."""
    inner = {name: draw(st.integers(1, 3)) for name in "abc"[: draw(st.integers(1, 3))]}
    axes = {"block": draw(st.integers(2, 5)), **inner} | ({"kv": 2} if draw(st.booleans()) else {})
    names = draw(st.permutations(sorted(axes)))
    if "kv" in names and draw(st.booleans()):
        names = ["kv", *(name for name in names if name != "kv")]
    return {name: axes[name] for name in names}


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any axes in any physical order with gaps: all that a permuted, sliced view of an allocation can be."""
    axes = draw(shapes())
    dtype = draw(st.sampled_from(DTYPES))
    order = draw(st.permutations([*axes, "layer"]))
    item = Spec(axes, "", dtype).item_bytes
    gaps = {name: draw(st.sampled_from([0, 0, 0, 0, item, 3 * item])) for name in order}
    layers = LAYERS[: draw(st.integers(1, 3))]
    return Spec(axes, " ".join(order), dtype, layers, draw(st.sampled_from([1, 1, 2, 3])), gaps)


def is_regular(spec: Spec) -> bool:
    """Tell whether the bytes of a block (of one plane, where there are two) are equal pieces at one pitch."""
    lengths = dict(spec.axes) | {"block": spec.ratio} | ({spec.plane_axis: 1} if spec.plane_axis else {})
    steps = [[i * spec.strides[name] for i in range(length)] for name, length in lengths.items()]
    offsets = sorted(sum(point) for point in product(*steps))
    runs = [[offsets[0], offsets[0]]]
    for offset in offsets:
        if offset > runs[-1][1]:
            runs.append([offset, offset])
        runs[-1][1] += spec.item_bytes
    return len({stop - start for start, stop in runs}) == 1 and len({b[0] - a[0] for a, b in pairwise(runs)}) <= 1


@given(specs(), st.data())
def test_any_layout_is_moved_byte_for_byte_or_refused(spec: Spec, data: st.DataObject) -> None:
    memory = Memory([spec], data.draw(st.integers(0, 1 << 30)))
    per_page = data.draw(st.integers(1, 2))
    if not is_regular(spec):
        event("refused")
        with pytest.raises(LayoutError, match="lie in no regular order"):
            read(memory, block_tokens=12, blocks_per_page=per_page)
        return
    caches = read(memory, block_tokens=12, blocks_per_page=per_page)
    event("planes" if spec.plane_axis else f"{min(caches.device.layout.components[0].num_parts, 2)} parts")
    num_blocks = spec.axes["block"] // per_page * per_page
    out = data.draw(st.permutations(range(spec.axes["block"])))[:num_blocks]
    into = data.draw(st.permutations(range(spec.axes["block"])))[:num_blocks]
    check_round_trip(memory, caches, out, into, spec.layers, data.draw(st.sampled_from(list(HostOrder))))
    owners = {component.name: spec.layers for component in caches.group.components}
    _, array = move_out(caches, out, HostOrder.PAGE_FIRST_DIRECT)
    assert array[: caches.group.page_bytes].tobytes() == host_page(memory, caches, owners, out[:per_page])


@given(shapes(), st.data())
def test_one_name_for_a_blocks_order_means_one_order(axes: dict[str, int], data: st.DataObject) -> None:
    """No wrong hit: where group and `block_order` of two engines are equal, so are the bytes that they mean."""
    assume(axes["block"] < 5)
    ratio = data.draw(st.sampled_from([1, 2]))
    read_as = []
    for _ in range(2):
        order = data.draw(st.permutations([*axes, "layer"]))
        num_blocks = axes["block"] + data.draw(st.integers(0, 2))
        spec = Spec(axes | {"block": num_blocks}, " ".join(order), "uint16", LAYERS[:2], ratio)
        memory = Memory([spec], 0)
        for number, (layer, view) in enumerate(memory.views().items()):
            for block in range(axes["block"]):
                content = memory.block(layer, block)
                numbers = np.arange(content.size, dtype=view.dtype).reshape(content.shape)
                content[...] = numbers + 1000 * (block + 10 * number)
        try:
            caches = read(memory, block_tokens=12)
        except LayoutError:
            event("refused")
            return
        host, array = move_out(caches, range(axes["block"]), HostOrder.PAGE_FIRST_DIRECT)
        read_as.append(((caches.group, caches.block_order), _pages(host, array)))
    (first, first_pages), (second, second_pages) = read_as
    event("one name" if first == second else "two names")
    if first == second:
        assert first_pages == second_pages


def _pages(host: Any, array: np.ndarray[Any, Any]) -> list[bytes]:
    pitch = host.group.page_pitch_bytes
    return [array[i * pitch : i * pitch + host.group.page_bytes].tobytes() for i in range(host.num_units)]
