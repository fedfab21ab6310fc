"""Stores that raise, lie, hang, damage or have no room: misses that are counted and logged once, never an exception."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang_rig import filled, mha_pool, names, page_bytes, slots

from kvhoist.messages import StorageKey
from kvhoist.storage import MemoryStore


class BadStore(MemoryStore):
    """A store whose calls named in `faults` do what stands there instead."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[str, Callable[..., Any]] = {}

    def _call(self, name: str, *args: Any) -> Any:
        return self.faults[name](*args) if name in self.faults else getattr(super(), name)(*args)

    def put(self, keys: Any, headers: Any, blobs: Any) -> list[bool]:
        return list(self._call("put", keys, headers, blobs))

    def get(self, keys: Any, blobs: Any) -> list[bytes | None]:
        return list(self._call("get", keys, blobs))

    def exists(self, keys: Any) -> list[bool]:
        return list(self._call("exists", keys))

    def remove_namespace(self, namespace: bytes) -> int:
        return int(self._call("remove_namespace", namespace))

    def note_namespace(self, namespace: bytes, fields: Any) -> None:
        self._call("note_namespace", namespace, fields)


def raising(error: BaseException) -> Callable[..., Any]:
    def act(*args: Any) -> Any:
        raise error

    return act


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> BadStore:
    store = BadStore()
    monkeypatch.setattr("kvhoist.adapters.sglang.storage.open_store", lambda address: store)
    return store


def every_call(made: Any, keys: list[str]) -> dict[str, Any]:
    """What each call of the interface answers, for two pages."""
    where = slots([0, 1])
    transfer = PoolTransfer(name=PoolName.KV, host_indices=where, keys=keys)
    return {
        "batch_set_v1": made.batch_set_v1(keys, where),
        "batch_get_v1": made.batch_get_v1(keys, where),
        "batch_exists": made.batch_exists(keys),
        "batch_set_v2": made.batch_set_v2([transfer]),
        "batch_get_v2": made.batch_get_v2([transfer]),
        "batch_exists_v2": made.batch_exists_v2(keys, []).kv_hit_pages,
        "batch_set": made.batch_set(keys, [made.mem_pool_host.get_data_page(0)] * 2),
        "batch_get": made.batch_get(keys),
        "exists": made.exists(keys[0]),
    }


NOTHING = {
    "batch_set_v1": [False, False],
    "batch_get_v1": [False, False],
    "batch_exists": 0,
    "batch_set_v2": {"kv": [False, False]},
    "batch_get_v2": {"kv": [False, False]},
    "batch_exists_v2": 0,
    "batch_set": False,
    "batch_get": [None, None],
    "exists": False,
}


@pytest.mark.parametrize(
    "fault",
    [raising(OSError("gone")), raising(ValueError("odd")), raising(SystemExit(3)), lambda *args: [], lambda *args: 7],
    ids=["OSError", "ValueError", "SystemExit", "too few answers", "no list"],
)
def test_a_store_that_fails_costs_hits_and_nothing_else(
    fault: Callable[..., Any], store: BadStore, backend: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    store.faults = dict.fromkeys(("put", "get", "exists", "note_namespace"), fault)
    made, keys = backend(mha_pool()), names(2)
    with caplog.at_level(logging.WARNING, "kvhoist.adapters.sglang"):
        for _ in range(3):
            assert every_call(made, keys) == NOTHING
    ours = [record for record in caplog.records if record.name.startswith("kvhoist.adapters")]
    told = [record.message.split()[2] for record in ours]
    assert sorted(told) == sorted(2 * ["backup", "lookup", "prefetch"])  # as it fails, and as it is fenced off
    assert made.counts()["prefetch_failed_pages"] == 18
    store.faults = {}
    deadline = time.monotonic() + 20
    while (
        not all(made.batch_set_v1(keys, slots([0, 1]))) or made.batch_exists(keys) < 2
    ):  # it is fenced off for a while
        assert time.monotonic() < deadline


def test_clear_that_fails_says_so_and_raises_nothing(store: BadStore, backend: Callable[..., Any]) -> None:
    made = backend(mha_pool())
    store.faults = {"remove_namespace": raising(OSError("read-only"))}
    assert not made.clear()
    store.faults = {}
    assert made.clear()


def test_a_short_read_is_a_miss(store: BadStore, backend: Callable[..., Any]) -> None:
    pool, keys = mha_pool(), names(3)
    made = backend(pool)
    before = page_bytes(pool, [0, 1, 2])
    assert all(made.batch_set_v1(keys, slots([0, 1, 2])))
    whole = store.get

    def short(wanted: Sequence[StorageKey], blobs: Any) -> list[bytes | None]:
        store.faults = {}
        headers = whole(wanted, blobs)
        for key, blob in zip(wanted, blobs, strict=True):
            if key.page.chain_hash.hex() == keys[1]:
                blob[-1] ^= 1  # the last byte is not the record's
        store.faults = {"get": short}
        return headers

    store.faults = {"get": short}
    filled(pool)
    made_again = backend(pool, {"io_threads": 1})
    assert made_again.batch_get_v1(keys, slots([4, 5, 6])) == [True, False, True]
    store.faults = {}
    assert page_bytes(pool, [4, 6]) == [before[0], before[2]]
    assert made_again.batch_exists(keys) == 1  # the page was taken out of use


def test_a_page_without_its_v_is_a_miss(store: BadStore, backend: Callable[..., Any]) -> None:
    pool, keys = mha_pool(), names(2)
    made = backend(pool)
    made.batch_set_v1(keys, slots([0, 1]))
    (v_of_second,) = [k for k in store._records if k.page.group == 1 and k.page.chain_hash.hex() == keys[1]]
    assert store.remove([v_of_second]) == 1
    assert made.batch_exists(keys) == 1
    assert made.batch_get_v1(keys, slots([2, 3])) == [True, False]
    assert made.batch_set_v1(keys, slots([0, 1])) == [True, True]
    assert made.batch_exists(keys) == 2


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_a_damaged_page_on_disk_is_a_miss_and_can_be_stored_again(
    layout: str, backend: Callable[..., Any], tmp_path: Path
) -> None:
    pool, keys = mha_pool(layout), names(4)
    made = backend(pool)
    before = page_bytes(pool, range(4))
    made.batch_set_v1(keys, slots(range(4)))
    made.close()
    part = before[2][:64]
    files = [file for file in (tmp_path / "store").rglob("*") if file.is_file() and part in file.read_bytes()]
    assert len(files) == 1
    data = bytearray(files[0].read_bytes())
    data[data.index(part) + 7] ^= 0x10
    files[0].write_bytes(data)
    filled(pool)
    kept = page_bytes(pool, [2])
    again = backend(pool)
    assert again.batch_get_v1(keys, slots(range(4))) == [True, True, False, True]
    assert layout != "layer_first" or page_bytes(pool, [2]) == kept  # a copy is checked before it is put there
    assert [page_bytes(pool, [page])[0] for page in (0, 1, 3)] == [before[page] for page in (0, 1, 3)]
    assert again.batch_exists(keys) == 2
    assert all(again.batch_set_v1(keys[2:3], slots([2])))
    assert again.batch_exists(keys) == 4


def test_a_store_without_room_says_which_pages_it_has_not(backend: Callable[..., Any]) -> None:
    pool, keys = mha_pool(pages=64), names(64)
    made = backend(pool, {"storage": "memory:", "capacity": "8KiB"})
    made.batch_set_v1(keys, slots(range(64)))
    held = [made.exists(key) for key in keys]
    assert 0 < sum(held) < 64
    before = page_bytes(pool, range(64))
    filled(pool)
    assert made.batch_get_v1(keys, slots(range(64))) == held
    assert all(a == b for a, b, ok in zip(page_bytes(pool, range(64)), before, held, strict=True) if ok)


def test_a_read_only_folder_gives_and_takes_nothing(backend: Callable[..., Any], tmp_path: Path) -> None:
    pool, keys = mha_pool(), names(2)
    backend(pool).batch_set_v1(keys[:1], slots([0]))
    reader = backend(pool, {"storage": f"file:{tmp_path}/store?read_only=true"})
    assert reader.batch_set_v1(keys[1:], slots([1])) == [False]
    assert reader.batch_exists(keys) == 1
    assert reader.batch_get_v1(keys, slots([4, 5])) == [True, False]


def test_pages_without_the_secret_are_misses(
    backend: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, keys = mha_pool(), names(2)
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"a secret of many bytes: {name}\n")
    plain = backend(pool)
    plain.batch_set_v1(keys, slots([0, 1]))
    assert backend(pool).batch_get_v1(keys, slots([0, 1])) == [True, True]
    signed = backend(pool, {"secret_file": str(tmp_path / "one")})
    assert signed.batch_get_v1(keys, slots([0, 1])) == [False, False]
    assert all(signed.batch_set_v1(keys, slots([0, 1])))
    assert signed.batch_get_v1(keys, slots([0, 1])) == [True, True]
    monkeypatch.setenv("KVHOIST_STORE_SECRET_FILE", str(tmp_path / "one"))
    assert backend(pool).batch_get_v1(keys, slots([0, 1])) == [True, True]
    other = backend(pool, {"secret_file": str(tmp_path / "two")})
    assert other.batch_get_v1(keys, slots([0, 1])) == [False, False]


def test_reads_go_on_while_a_write_hangs(store: BadStore, backend: Callable[..., Any]) -> None:
    pool, keys = mha_pool(), names(2)
    made = backend(pool)
    made.batch_set_v1(keys[:1], slots([0]))
    hangs, free = threading.Event(), threading.Event()

    def hang(wanted: Sequence[StorageKey], *_: Any) -> list[bool]:
        hangs.set()
        assert free.wait(60)
        return [False] * len(wanted)

    store.faults = {"put": hang}
    answer: list[list[bool]] = []
    writer = threading.Thread(target=lambda: answer.append(made.batch_set_v1(keys[1:], slots([1]))))
    writer.start()
    assert hangs.wait(60)
    assert made.batch_exists(keys) == 1
    assert made.batch_get_v1(keys[:1], slots([2])) == [True]
    free.set()
    writer.join(60)
    assert answer == [[False]]
