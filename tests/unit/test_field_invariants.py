"""What breaks in the field, as invariants: see docs/invariants.md, which names a test for each."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import pytest
from support import HEADS, PAGE_TOKENS, TinyEngine, namespace

from kvhoist.cache import HierarchicalCache
from kvhoist.copy.reference import BoundPlan
from kvhoist.device_layout import read_device_layout
from kvhoist.geometry import CacheGeometry, CacheGroup, Component

ROOT = Path(__file__).parents[2]
PROMPT = [*range(100, 140), 7]


def test_the_documents_invariants_name_tests_that_exist() -> None:
    text = (ROOT / "docs/invariants.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) >= 12
    assert sorted(name for name in named if f"def {name}(" not in tests) == []


@pytest.mark.parametrize(
    "fields", [{"weights_id": "w2"}, {"tenant": "b"}, {"config": {"rope_theta": 1e6}}, {"lora": "l"}]
)
def test_same_name_other_weights_tenant_rope_or_lora_share_no_page_on_disk(fields, tmp_path: Path) -> None:
    address = f"file:{tmp_path}?capacity=64MiB"
    with TinyEngine(device_pages=16, host_pages=16, store=address) as engine:
        engine.run(PROMPT)
    with TinyEngine(device_pages=16, host_pages=16, store=address) as engine:
        other = namespace(engine.geometry, **fields)
        assert engine.cache.match(PROMPT, namespace=other).num_pages == 0
        assert engine.cache.match(PROMPT).num_pages == 10


def test_two_geometries_on_one_folder_neither_meet_nor_harm_each_other(tmp_path: Path) -> None:
    address = f"file:{tmp_path}?capacity=64MiB"
    other = CacheGeometry.attention(2, k_row_bytes=HEADS * 16, v_row_bytes=0, page_tokens=PAGE_TOKENS)
    tensors = {"k": [np.zeros((64, HEADS, 8), np.float16) for _ in range(2)]}
    device = read_device_layout(other.groups[0], tensors, "slot head dim")
    with (
        TinyEngine(device_pages=16, host_pages=16, store=address) as engine,
        HierarchicalCache(other, namespace(other), device=device, host_bytes="64KiB", store=address) as second,
    ):
        engine.run(PROMPT)
        assert engine.cache.flush(30)
        assert second.match(PROMPT).num_pages == 0
        with second.reserve(PROMPT) as pages:
            pages.commit()
        assert second.flush(30)
    with (
        TinyEngine(device_pages=16, host_pages=16, store=address) as engine,
        HierarchicalCache(other, namespace(other), device=device, host_bytes="64KiB", store=address) as second,
    ):
        assert engine.run(PROMPT)["storage"] == 40
        assert second.match(PROMPT).pages_by_tier["storage"] == 10
        second.audit()


def test_a_layer_is_waited_for_with_all_its_components(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side component (scales, indexer rows) must not be read before its layer arrived."""
    group = CacheGroup(
        (Component("latent", tuple(range(12)), 32), Component("scale", tuple(range(0, 12, 2)), 4)), page_tokens=4
    )
    geometry = CacheGeometry((group,))
    tensors = {
        "latent": [np.zeros((32, 32), np.uint8) for _ in range(12)],
        "scale": [np.zeros((32, 4), np.uint8) for _ in range(6)],
    }
    device = read_device_layout(group, tensors, "slot dim")
    gate, real = threading.Semaphore(0), BoundPlan.copy

    def copy(plan: BoundPlan, src: object, dst: object) -> int:
        if plan.plan.dst.name == "device":
            assert gate.acquire(timeout=30)
        return real(plan, src, dst)

    monkeypatch.setattr(BoundPlan, "copy", copy)
    with HierarchicalCache(geometry, namespace(geometry), device=device, host_bytes="64KiB") as cache:
        with cache.reserve(list(range(16))) as pages:
            for name, layers in tensors.items():
                for number, tensor in enumerate(layers):
                    tensor[:] = number + (100 if name == "scale" else 1)
            pages.commit()
        assert cache.flush(30)
        cache.evict("device", 8)
        for layers in tensors.values():
            for tensor in layers:
                tensor[:] = 255
        with cache.acquire(cache.match(list(range(16))), layerwise=True) as lease:
            slots = [page * 4 + i for page in lease.device_pages for i in range(4)]
            assert len(slots) == 16
            for layer in range(12):
                gate.release()
                lease.wait(layer, timeout_s=30)
                assert (tensors["latent"][layer][slots] == layer + 1).all()
                if layer % 2 == 0:
                    assert (tensors["scale"][layer // 2][slots] == layer // 2 + 100).all()
            lease.wait(timeout_s=30)
        cache.audit()


def test_an_idle_cache_uses_no_cpu() -> None:
    others = set(threading.enumerate())
    with TinyEngine(device_pages=16, host_pages=16) as engine:
        engine.run(PROMPT)
        assert engine.cache.flush(30)
        threads = [thread for thread in threading.enumerate() if thread not in others]
        assert threads
        before = _switches(threads)
        threading.Event().wait(0.5)
        assert _switches(threads) - before <= 2, "idle threads woke up"


def _switches(threads: list[threading.Thread]) -> int:
    """Voluntary context switches of threads: what a poll would count up."""
    texts = [Path(f"/proc/self/task/{thread.native_id}/status").read_text() for thread in threads]
    return sum(int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.M)[0]) for text in texts)
