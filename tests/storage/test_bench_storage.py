from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvhoist.bench import fio, storage
from kvhoist.bench.engine_side import EngineSide
from kvhoist.bench.faulty_store import FAULTS, FaultyStore
from kvhoist.bench.stopwatch import Stopwatch
from kvhoist.bench.storage_match import SMOKE_SHAPE
from kvhoist.errors import ConfigError, StorageError, StoreUnavailableError
from kvhoist.messages import StorageKey
from kvhoist.storage import MemoryStore

FAKE = """#!/usr/bin/env python3
import json, sys
if sys.argv[1:] == ["--version"]:
    print("fio-3.0")
    sys.exit()
options = dict(argument.lstrip("-").split("=", 1) for argument in sys.argv[1:])
print("fio: a warning of its own")
print(json.dumps({"jobs": [{options["rw"]: {"bw_bytes": int(options["bs"]) * int(options["iodepth"])}}]}))
"""


def fake_fio(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = FAKE) -> None:
    folder.mkdir()
    (folder / "fio").write_text(text)
    (folder / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    folder.mkdir()
    result = storage.run(folder, num_pages=300, page_bytes=[1 << 16], smoke=True, part="speed")
    json.dumps(result)
    assert list(folder.iterdir()) == [], "nothing is left behind"
    (size,) = result["sizes"]
    assert size["page_bytes"] == 1 << 16
    assert result["reindex"]["num_pages"] == 300
    assert result["reindex"]["pass"]
    assert result["disk"]
    assert "in all arms" in result["caching"]
    return result, size


def test_the_benchmark_compares_to_the_better_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fio(tmp_path / "bin", monkeypatch)
    result, size = run(tmp_path / "disk")
    assert result["fio"] == "fio-3.0"
    for direction in ("write", "read"):
        assert set(size[direction]["gib_per_s"]) == {"fio 8", "fio 64", "store", "pool"}
        pool = size[direction]["gib_per_s"]["pool"] * (1 << 30) / (64 << 16)
        assert size[direction]["ratio"]["pool"] == pytest.approx(pool, rel=0.01)


def test_without_fio_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result, size = run(tmp_path / "disk")
    assert "not installed" in result["fio"]
    assert "apt-get install fio" in result["fio"]
    assert not result["pass"]
    assert "ratio" not in size["read"]
    assert set(size["read"]["gib_per_s"]) == {"store", "pool"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#!/bin/sh\necho no such engine >&2\nexit 1\n", "fio failed.*no such engine"),
        ("#!/bin/sh\necho hello\n", "fio gave no result"),
        ("#!/bin/sh\necho '{}'\n", "fio gave no result.*jobs"),
    ],
)
def test_a_fio_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    fake_fio(tmp_path / "bin", monkeypatch, text)
    with pytest.raises(StorageError, match=message):
        fio.measure(tmp_path / "disk", block_bytes=4096, total_bytes=8192, depth=1, direct=False)


def test_direct_and_the_page_cache_take_turns(tmp_path: Path) -> None:
    rows = storage.run(tmp_path, smoke=True, part="direct")["direct"]
    assert list(tmp_path.iterdir()) == []
    for row in rows:  # none where there is no O_DIRECT
        ratio = row["off_gib_per_s"] / row["on_gib_per_s"]
        assert row["off_over_on"] == pytest.approx(ratio, abs=0.01 + 0.02 * ratio)


CALLS = {"match", "match unknown", "acquire", "release", "reserve", "commit"}


def test_an_engines_calls_are_timed_idle_and_under_load(tmp_path: Path) -> None:
    result = storage.run(tmp_path, smoke=True, part="match")
    json.dumps(result)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    rows = result["match"]
    assert {(row["arm"], row["call"]) for row in rows} == {(arm, call) for arm in ("idle", "load") for call in CALLS}
    for row in rows:
        assert row["calls"] > 0
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["p99.9_ms"] <= row["max_ms"]
        assert row["p99_on_cpu_ms"] <= row["p99_ms"]
        if row["arm"] == "load":
            assert row["gib_per_s"] > 0
            idle = next(other for other in rows if (other["arm"], other["call"]) == ("idle", row["call"]))
            assert row["target_ms"] == pytest.approx(idle["p99_ms"] + 1.0)
            assert row["pass"] == (row["p99_ms"] <= row["target_ms"])
    assert result["pass"] == all(row.get("pass", True) for row in rows)


def test_no_page_id_is_lost_to_a_store_that_fails_and_it_is_found_again(tmp_path: Path) -> None:
    """A FileStore with planted faults, and a real Mooncake master that is killed and stopped."""
    result = storage.run(tmp_path, smoke=True, part="faults")
    json.dumps(result)
    assert list(tmp_path.iterdir()) == []
    kinds = [*[("file", fault) for fault in FAULTS], ("mooncake", "killed"), ("mooncake", "hangs")]
    assert [(row["store"], row["fault"]) for row in result["faults"]] == kinds
    for row in result["faults"]:
        assert row["lost_pages"] == 0
        assert row["pass"], f"not found again: {row}"
    calls = {(row["store"], row["fault"], row["call"]) for row in result["fault_calls"]}
    assert calls >= {(*kind, call) for kind in kinds for call in ("match", "match unknown")}


def test_a_page_id_that_is_lost_is_counted() -> None:
    side = EngineSide(MemoryStore("64MiB"), SMOKE_SHAPE)
    with Stopwatch() as watch, side.load():
        side.run(0.05, watch)
    assert side.lost_pages() == 0
    forgotten = side.cache.reserve([1 << 31] * 2 * SMOKE_SHAPE.group.page_tokens)
    assert side.lost_pages() == 2
    forgotten.abandon()
    side.close()


def test_a_fault_is_what_it_is_called_and_ends(pages: Any) -> None:
    store = FaultyStore(MemoryStore("1MiB"), slow_s=0.0)
    pages.put(store, range(3))
    with store.broken("killed"), pytest.raises(StoreUnavailableError):
        pages.read(store, range(3))
    with store.broken("fails"), pytest.raises(OSError, match="broke this store"):
        pages.put(store, range(3))
    keys: list[StorageKey] = pages.keys(range(3))
    with store.broken("short"):
        assert store.exists(keys) == [True] * 2
    with store.broken("slow"):
        assert store.exists(keys) == [True] * 3
    with ThreadPoolExecutor(1) as pool:
        with store.broken("hangs"):
            hung = pool.submit(store.exists, keys)
            assert not hung.done()
        assert hung.result(20) == [True] * 3


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="valid choices: speed, direct, match, faults, all"):
        storage.run(part="everything")
