"""MooncakeStore against the raw batch calls of Mooncake's own client, on this machine's loopback, in one run.

A mooncake_master and a process that lends memory are started, and ended. All arms use one client in this process and
the same registered memory; the bytes go over TCP.

python -m kvhoist.bench.mooncake [--smoke]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvhoist.bench.facts import facts
from kvhoist.bench.mooncake_cluster import running_cluster
from kvhoist.bench.storage_speed import BATCH_PAGES, demand, pages_of
from kvhoist.messages import WHOLE, PageKey, StorageKey
from kvhoist.storage.base import Buffer, address_of
from kvhoist.storage.io import StorageIO
from kvhoist.storage.mooncake import MooncakeOptions, MooncakeStore
from kvhoist.storage.mooncake.client import Client, open_client, release
from kvhoist.storage.record import Sealer

TARGET_RATIO = 0.9

_PAGE_BYTES, _SMOKE_PAGE_BYTES = (1 << 20, 2 << 20, 4 << 20), (1 << 18,)
_NAMESPACE = bytes(32)


def run(smoke: bool = False) -> dict[str, Any]:
    """Measure, per page size, GiB/s of one batch of 64 pages put and got: `raw` (the client's `batch_put_from` and
    `batch_get_into`), `store` (MooncakeStore, one call) and `pool` (through StorageIO, checksums made and verified).

    Medians over rounds in which the arms take turns in random order. `ratio` is that of the medians to `raw`,
    `ratio_of_best` that of the best rounds. Raises MissingDependencyError without Mooncake, StoreUnavailableError where
    it does not start.
    """
    rounds = 2 if smoke else 15
    sizes = _SMOKE_PAGE_BYTES if smoke else _PAGE_BYTES
    with running_cluster(3 * BATCH_PAGES * max(sizes) + (64 << 20)) as cluster:
        measured = [_measure(cluster.options, page_bytes, rounds) for page_bytes in sizes]
    return {
        "bench": "mooncake",
        "smoke": smoke,
        **facts(),
        "transport": "tcp over loopback, memory of another process",
        "sizes": measured,
        "pass": all(size[way]["pass"] for size in measured for way in ("put", "get")),
    }


def _measure(options: MooncakeOptions, page_bytes: int, rounds: int) -> dict[str, Any]:
    client = open_client(options)
    store = MooncakeStore(options)
    batch = np.random.default_rng(0).integers(0, 256, BATCH_PAGES * page_bytes, dtype=np.uint8)
    target = np.ones_like(batch)
    blobs, buffers = pages_of(batch, page_bytes), pages_of(target, page_bytes)
    for memory in (batch, target):
        store.register(memory.data)
    arms: dict[str, Callable[[], tuple[float, float]]] = {
        "raw": lambda: _raw(client, blobs, buffers),
        "store": lambda: _store(store, blobs, buffers),
        "pool": lambda: _pool(store, blobs, buffers),
    }
    rates: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    order = random.Random(0)
    for _ in range(rounds + 1):
        for arm in order.sample(list(arms), len(arms)):
            target[:] = 0
            put_s, get_s = arms[arm]()
            demand(bool((target == batch).all()))
            rates[arm].append((batch.nbytes / put_s, batch.nbytes / get_s))
    store.close()
    release(client)
    warm = {arm: rows[1:] for arm, rows in rates.items()}  # the first round makes the connections
    return {"page_bytes": page_bytes, "rounds": rounds, "put": _figures(warm, 0), "get": _figures(warm, 1)}


def _figures(rates: dict[str, list[tuple[float, float]]], column: int) -> dict[str, Any]:
    by_arm = {arm: [rate[column] for rate in rows] for arm, rows in rates.items()}
    medians = {arm: statistics.median(rows) for arm, rows in by_arm.items()}
    ratios = {arm: medians[arm] / medians["raw"] for arm in ("store", "pool")}
    return {
        "gib_per_s": {arm: round(median / (1 << 30), 3) for arm, median in medians.items()},
        "ratio": {arm: round(ratio, 3) for arm, ratio in ratios.items()},
        "ratio_of_best": {arm: round(max(by_arm[arm]) / max(by_arm["raw"]), 3) for arm in ratios},
        "target_ratio": TARGET_RATIO,
        "pass": ratios["store"] >= TARGET_RATIO,
    }


def _raw(client: Client, blobs: Sequence[Buffer], buffers: Sequence[Buffer]) -> tuple[float, float]:
    names = [f"kvhoist-bench/{i}" for i in range(len(blobs))]
    lengths = [len(blob) for blob in blobs]
    sources, targets = [address_of(blob) for blob in blobs], [address_of(buffer) for buffer in buffers]
    begin = time.perf_counter()
    put = client.codes(lambda engine: engine.batch_put_from(names, sources, lengths))
    put_s = time.perf_counter() - begin
    begin = time.perf_counter()
    got = client.codes(lambda engine: engine.batch_get_into(names, targets, lengths))
    get_s = time.perf_counter() - begin
    demand(not any(put) and got == lengths)
    client.codes(lambda engine: engine.batch_remove(names, True))
    return put_s, get_s


def _store(store: MooncakeStore, blobs: Sequence[Buffer], buffers: Sequence[Buffer]) -> tuple[float, float]:
    keys, sealer = _keys(len(blobs)), Sealer()
    headers = [sealer.seal(key, blob) for key, blob in zip(keys, blobs, strict=True)]
    begin = time.perf_counter()
    kept = store.put(keys, headers, blobs)
    put_s = time.perf_counter() - begin
    begin = time.perf_counter()
    got = store.get(keys, buffers)
    get_s = time.perf_counter() - begin
    demand(all(kept) and got == headers)
    store.remove(keys)
    return put_s, get_s


def _pool(store: MooncakeStore, blobs: Sequence[Buffer], buffers: Sequence[Buffer]) -> tuple[float, float]:
    keys = _keys(len(blobs))
    io = StorageIO(store, Sealer())
    begin = time.perf_counter()
    kept = io.persist(keys, blobs).result()
    put_s = time.perf_counter() - begin
    begin = time.perf_counter()
    got = io.prefetch(keys, buffers).result()
    get_s = time.perf_counter() - begin
    demand(kept.error is None and got.error is None)
    io.close()
    store.remove(keys)
    return put_s, get_s


def _keys(count: int) -> list[StorageKey]:
    return [StorageKey(PageKey(_NAMESPACE, 0, b"bench" + i.to_bytes(27, "little")), WHOLE) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvhoist.bench.mooncake", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a quick run on little data")
    print(json.dumps(run(parser.parse_args().smoke), indent=1))


if __name__ == "__main__":
    main()
