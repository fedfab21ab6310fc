"""A tiny engine for tests: device tensors whose bytes say which tokens they stand for, so that a wrong page is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np

from kvhoist.cache import HierarchicalCache
from kvhoist.config import CacheConfig
from kvhoist.control.namespace import Namespace
from kvhoist.device_layout import DeviceCache, read_device_layout
from kvhoist.geometry import CacheGeometry
from kvhoist.lease import Lease

PAGE_TOKENS = 4
NUM_LAYERS = 3
HEADS, DIM = 2, 8
ROW_BYTES = HEADS * DIM * 2


def tiny_geometry(blocks_per_page: int = 1) -> CacheGeometry:
    return CacheGeometry.attention(
        NUM_LAYERS,
        k_row_bytes=ROW_BYTES,
        v_row_bytes=ROW_BYTES,
        page_tokens=PAGE_TOKENS,
        blocks_per_page=blocks_per_page,
    )


def namespace(geometry: CacheGeometry, **fields: Any) -> Namespace:
    named = {"model_id": "tiny", "weights_id": "w1", "kv_dtype": "float16"} | fields
    return Namespace.create(geometry=geometry, **named)


def row(tokens: Sequence[int], layer: int, component: str) -> np.ndarray[Any, Any]:
    """The bytes that a model would compute for the last of `tokens`: they depend on all of them, as attention's do."""
    seed = sha256(repr((list(tokens), layer, component)).encode()).digest()
    return np.frombuffer((seed * (ROW_BYTES // 32 + 1))[:ROW_BYTES], dtype=np.float16).reshape(HEADS, DIM)


def _patient(config: CacheConfig) -> CacheConfig:
    """Wait for storage to answer as long as a busy machine takes; what a test chose stays as it is."""
    chosen = config.lookup_timeout_s != CacheConfig().lookup_timeout_s
    return config if chosen else replace(config, lookup_timeout_s=30.0)


class TinyEngine:
    """Device tensors [slots, heads, dim] a layer for K and V, and a cache over them.

    `run` does what an engine does for one prompt: acquire the prefix, check each of its bytes, compute the rest into
    reserved pages, commit; it returns how many tokens came from which tier.
    """

    def __init__(
        self,
        *,
        device_pages: int,
        host_pages: int,
        store: Any = None,
        config: CacheConfig | None = None,
        blocks: int = 1,
    ) -> None:
        self.geometry = tiny_geometry(blocks)
        group = self.geometry.groups[0]
        shape = (device_pages * PAGE_TOKENS, HEADS, DIM)
        self.tensors = {name: [self.tensor(shape) for _ in range(NUM_LAYERS)] for name in ("k", "v")}
        self.device: DeviceCache = self.read(read_device_layout(group, self.tensors, "slot head dim"))
        self.cache = HierarchicalCache(
            self.geometry,
            namespace(self.geometry),
            device=self.device,
            host_bytes=host_pages * group.page_pitch_bytes,
            store=store,
            config=_patient(config or CacheConfig()),
            engine_stream=lambda: 0,
        )

    def tensor(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return a tensor of the cache, full of 7."""
        return np.full(shape, 7, dtype=np.float16)

    def read(self, cache: DeviceCache) -> DeviceCache:
        """Return the cache as the engine's device has it."""
        return cache

    def __enter__(self) -> TinyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.audit()
        self.cache.close()

    def run(self, tokens: Sequence[int], *, salt: bytes = b"", check: bool = True) -> dict[str, int]:
        match = self.cache.match(tokens, salt=salt, max_tokens=len(tokens) - 1)
        with self.cache.acquire(match) as lease:
            if check:
                self.check(tokens, lease)
            with self.cache.reserve(tokens, lease=lease, salt=salt) as reservation:
                for index, page in zip(reservation.page_indices, reservation.device_pages, strict=True):
                    self.compute(tokens, index, page)
                reservation.commit()
            return lease.tokens_by_tier

    def compute(self, tokens: Sequence[int], page_index: int, device_page: int) -> None:
        """Write the KV of one page of `tokens` to a device page."""
        for name, layers in self.tensors.items():
            for layer, tensor in enumerate(layers):
                for i in range(PAGE_TOKENS):
                    end = page_index * PAGE_TOKENS + i + 1
                    tensor[device_page * PAGE_TOKENS + i] = row(tokens[:end], layer, name)

    def check(self, tokens: Sequence[int], lease: Lease) -> None:
        """Assert that every byte of the leased pages is what computing `tokens` gives."""
        wrong = self.wrong_pages(tokens, lease.device_pages)
        assert not wrong, f"pages {wrong} of {lease.num_pages} hold other bytes"

    def wrong_pages(self, tokens: Sequence[int], device_pages: Sequence[int]) -> list[int]:
        wrong = []
        for index, page in enumerate(device_pages):
            for name, layers in self.tensors.items():
                for layer, tensor in enumerate(layers):
                    for i in range(PAGE_TOKENS):
                        end = index * PAGE_TOKENS + i + 1
                        same = tensor[page * PAGE_TOKENS + i].tobytes() == row(tokens[:end], layer, name).tobytes()
                        if not same and index not in wrong:
                            wrong.append(index)
        return wrong

    def scribble(self) -> None:
        """Overwrite all device memory, so that nothing but a transfer can bring bytes back."""
        for layers in self.tensors.values():
            for tensor in layers:
                tensor[:] = -1
