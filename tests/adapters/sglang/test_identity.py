"""Whose pages these are: ranks share a folder, and whatever changes the bytes is another namespace, so a miss."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
import torch
from mover_support import until
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang_rig import (
    OPTIONS,
    create_backend,
    filled,
    mha_pool,
    mla_pool,
    names,
    page_bytes,
    slots,
    write_checkpoint,
)
from sglang_standin import Engine, sources

from kvhoist.adapters.sglang.options import StorageOptions
from kvhoist.errors import ConfigError, UnsupportedGeometryError

KEYS = names(3)
HERE = slots([0, 1, 2])


def test_ranks_keep_their_own_part_of_a_page_in_one_folder(backend: Callable[..., Any]) -> None:
    pools = [mha_pool(), mha_pool()]
    before = [page_bytes(pool, [0, 1, 2]) for pool in pools]
    ranks = [backend(pools[0], tp_rank=0, tp_size=2)]
    assert all(ranks[0].batch_set_v1(KEYS, HERE))
    ranks.append(backend(pools[1], tp_rank=1, tp_size=2))
    assert [rank.batch_exists(KEYS) for rank in ranks] == [3, 0]
    assert all(ranks[1].batch_set_v1(KEYS, HERE))
    for rank in ranks:
        rank.close()
    for rank, pool in enumerate(pools):
        again = backend(filled(pool), tp_rank=rank, tp_size=2)
        assert all(again.batch_get_v1(KEYS, HERE))
        assert page_bytes(pool, [0, 1, 2]) == before[rank]
    assert backend(pools[0]).batch_exists(KEYS) == 0  # an engine of one rank has whole heads


def test_latent_pages_are_written_by_one_rank_for_all(backend: Callable[..., Any]) -> None:
    pools = [mla_pool(), mla_pool()]
    ranks = [backend(p, tp_rank=r, tp_size=2, is_mla_model=True) for r, p in enumerate(pools)]
    assert ranks[1].batch_set_v1(KEYS, HERE) == [True] * 3
    assert ranks[1].batch_set(KEYS, [pools[1].get_data_page(0)] * 3)
    assert [rank.batch_exists(KEYS) for rank in ranks] == [0, 0]
    assert all(ranks[0].batch_set_v1(KEYS, HERE))
    until(lambda: all(ranks[1].batch_get_v1(KEYS, HERE)))
    assert page_bytes(pools[1], [0, 1, 2]) == page_bytes(pools[0], [0, 1, 2])


def test_heads_beside_latent_rows_are_each_ranks_own(backend: Callable[..., Any]) -> None:
    transfer = [PoolTransfer(name=PoolName.DRAFT, host_indices=HERE, keys=KEYS)]

    def rank(number: int) -> Any:
        made = backend(mla_pool(), tp_rank=number, tp_size=2, is_mla_model=True)
        made.register_mem_host_pool_v2(mha_pool(), PoolName.DRAFT)
        return made

    assert rank(0).batch_set_v2(transfer) == {PoolName.DRAFT: [True] * 3}
    assert rank(1).batch_get_v2(transfer) == {PoolName.DRAFT: [False] * 3}
    assert rank(0).batch_get_v2(transfer) == {PoolName.DRAFT: [True] * 3}


def test_context_parallel_ranks_hold_different_slices(backend: Callable[..., Any]) -> None:
    def rank(number: int) -> Any:
        return backend(mla_pool(), attn_cp_rank=number, attn_cp_size=2, is_mla_model=True)

    assert all(rank(0).batch_set_v1(KEYS, HERE))
    assert [rank(number).batch_exists(KEYS) for number in range(2)] == [3, 0]


def model(**changes: Any) -> Callable[[Engine], None]:
    return lambda engine: vars(engine.model).update(changes)


CHANGES: dict[str, Callable[[Engine], None]] = {
    "weights": lambda engine: write_checkpoint(Path(engine.model.model_path), bytes(64)) and None,
    "config": lambda engine: write_checkpoint(Path(engine.model.model_path), rope_theta=1e6) and None,
    "overrides": model(json_model_override_args='{"rope_theta": 1}'),
    "context length": model(context_length=4096),
    "dtype": model(dtype="float16"),
    "KV dtype": model(kv_cache_dtype="fp8_e4m3"),
    "quantization": model(quantization="fp8"),
    "dummy weights": model(load_format="dummy"),
    "attention": lambda engine: vars(engine.exec.kernel).update(attention_backend="fa3"),
    "prefill attention": lambda engine: vars(engine.exec.kernel).update(prefill_attention_backend="fa3"),
    "decode attention": lambda engine: vars(engine.exec.kernel).update(decode_attention_backend="fa3"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_is_a_miss(change: str, backend: Callable[..., Any], engine: Engine) -> None:
    pool = mha_pool()
    assert all(backend(pool).batch_set_v1(KEYS, HERE))
    assert backend(pool, model_name="served under another name").batch_exists(KEYS) == 3
    CHANGES[change](engine)
    other = backend(pool)
    assert other.batch_exists(KEYS) == 0
    assert other.batch_get_v1(KEYS, HERE) == [False] * 3


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({"weights_id": "mine"}, {}),
        ({"tenant": "someone"}, {}),
        ({}, {"tp_size": 2}),
        ({}, {"pp_size": 2, "pp_rank": 0}),
        ({}, {"attn_cp_size": 2}),
    ],
    ids=["weights_id", "tenant", "tensor parallel", "pipeline", "context parallel"],
)
def test_other_settings_and_another_split_are_misses(
    options: dict[str, Any], config: dict[str, Any], backend: Callable[..., Any]
) -> None:
    pool = mha_pool()
    assert all(backend(pool).batch_set_v1(KEYS, HERE))
    assert backend(pool, options, **config).batch_exists(KEYS) == 0


@pytest.mark.parametrize(
    ("file", "part"),
    [("model", "model"), ("spec", "spec"), ("lora", "lora"), ("exec_", "exec.kernel")],
)
def test_what_the_stand_in_says_of_the_engine_sglang_says_too(file: str, part: str, engine: Engine) -> None:
    folder = sources()
    assert folder is not None
    tree = ast.parse((folder / f"srt/arg_groups/fields/{file}.py").read_text())
    names = {
        node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")
    }
    assert set(vars(attrgetter(part)(engine))) <= names


def test_the_log_says_once_in_which_fields_the_folders_pages_differ(
    backend: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        return [record.message for record in caplog.records if "the nearest differs in" in record.message]

    first = backend(mha_pool(), {"weights_id": "one"})
    first.register_mem_host_pool_v2(mha_pool(heads=1), PoolName.INDEXER)
    first.register_mem_host_pool_v2(first.mem_pool_host, PoolName.KV)
    until(lambda: len(first._io.store.namespaces()) == 2)
    second = backend(mha_pool(), {"weights_id": "two"})
    until(told)
    until(lambda: len(second._io.store.namespaces()) == 3)
    assert told() == [
        "kvhoist storage: no hits from pages that are there: the nearest differs in "
        'weights_id (there "one", here "two")'
    ]


def test_stages_of_a_pipeline_do_not_share(backend: Callable[..., Any]) -> None:
    assert all(backend(mha_pool(), pp_size=2, pp_rank=0).batch_set_v1(KEYS, HERE))
    assert [backend(mha_pool(), pp_size=2, pp_rank=rank).batch_exists(KEYS) for rank in range(2)] == [3, 0]


@pytest.mark.parametrize(
    "other",
    [
        lambda: mha_pool("page_first_direct"),
        lambda: mha_pool("layer_first"),
        lambda: mha_pool(heads=4),
        lambda: mha_pool(layers=2),
        mla_pool,
    ],
    ids=["layout", "copied layout", "heads", "layers", "latent rows"],
)
def test_another_shape_of_pages_is_a_miss(other: Callable[[], Any], backend: Callable[..., Any]) -> None:
    assert all(backend(mha_pool()).batch_set_v1(KEYS, HERE))
    assert backend(mha_pool(pages=64)).batch_exists(KEYS) == 3  # how many pages the host has is nobody's business
    assert backend(other()).batch_exists(KEYS) == 0


def test_another_release_of_sglang_is_a_miss(backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = mha_pool()
    assert all(backend(pool).batch_set_v1(KEYS, HERE))
    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    assert backend(pool).batch_exists(KEYS) == 0


def test_a_copy_of_the_model_elsewhere_is_the_same(
    backend: Callable[..., Any], engine: Engine, checkpoint: Path, tmp_path: Path
) -> None:
    pool = mha_pool()
    assert all(backend(pool).batch_set_v1(KEYS, HERE))
    engine.model.model_path = str(shutil.copytree(checkpoint, tmp_path / "copy"))
    assert backend(pool).batch_exists(KEYS) == 3


def test_files_beside_the_model_count_too(backend: Callable[..., Any], engine: Engine, tmp_path: Path) -> None:
    pool = mha_pool()

    def stored(change: Callable[[], None]) -> list[int]:
        """Hits before and after something was stored, and after a change."""
        made = backend(pool)
        found = [made.batch_exists(KEYS), sum(made.batch_set_v1(KEYS, HERE))]
        change()
        return [*found, backend(pool).batch_exists(KEYS)]

    scales, draft = tmp_path / "scales.json", tmp_path / "draft"
    scales.write_text("1")
    engine.model.quantization_param_path = str(scales)
    assert stored(lambda: scales.write_text("2") and None) == [0, 3, 0]
    engine.spec.speculative_draft_model_path = str(write_checkpoint(draft))
    assert stored(lambda: write_checkpoint(draft, bytes(64)) and None) == [0, 3, 0]
    adapter = write_checkpoint(tmp_path / "adapter")
    engine.lora.enable_lora = True
    engine.lora.lora_paths = [SimpleNamespace(lora_name="a", lora_path=str(adapter))]
    assert stored(lambda: write_checkpoint(adapter, bytes(64)) and None) == [0, 3, 0]
    scales.unlink()
    with pytest.raises(ConfigError, match="KV scales cannot be read"):
        backend(pool)


def test_weights_without_files_need_a_name(backend: Callable[..., Any], engine: Engine, checkpoint: Path) -> None:
    engine.model.model_path = "nobody/has-this"
    with pytest.raises(ConfigError, match=r"no fingerprint of the model's weights.*nobody/has-this.*weights_id"):
        backend(mha_pool())
    assert backend(mha_pool(), {"weights_id": "v1"}).batch_exists(KEYS) == 0
    assert all(backend(mha_pool(), {"model_path": str(checkpoint)}).batch_set_v1(KEYS, HERE))
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is no JSON"):
        backend(mha_pool(), {"model_path": str(checkpoint)})


def test_what_is_not_served_is_refused_at_the_start(backend: Callable[..., Any], engine: Engine) -> None:
    with pytest.raises(ConfigError, match="decode context parallelism"):
        backend(mla_pool(), is_mla_model=True, tp_size=2, dcp_size=2, logical_page_size=8)
    with pytest.raises(ConfigError, match="tp_lcm_size=4"):
        backend(mha_pool("page_head"), tp_lcm_size=4, should_split_heads=True)
    with pytest.raises(UnsupportedGeometryError, match=r"host pool 'kv'.*page_first_direct"):
        backend(SimpleNamespace(page_size=4, layout="layer_first", get_data_page=lambda *a, **k: torch.empty(0)))
    engine.model = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="not published"):
        backend(mha_pool())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "lacks storage"),
        ({"storage": "file:/x", "storge": 1}, r"unknown setting: storge.*valid choices.*Did you mean 'storage'"),
        ({"storage": "file:/x", "salt": "a"}, "Here it is tenant"),
        ({"storage": "file:/x", "secret": "a"}, "Here it is secret_file"),
        ({"storage": 7}, "storage is no text"),
        ({"storage": ""}, "storage is no text"),
        ({"storage": "file:/x", "weights_id": ""}, "weights_id is no text"),
        ({"storage": "file:/x", "io_threads": 0}, "io_threads is out of range"),
        ({"storage": "file:/x", "capacity": "much"}, "capacity is not a usable number"),
        ({"storage": "file:/x?capacity=1GiB", "capacity": "1GiB"}, "capacity is given twice"),
        ({"storage": "flie:/x"}, "an unknown kind of store"),
        ({"storage": "memory:", "secret_file": "relative"}, "not an absolute path"),
        ({"storage": "memory:", "secret_file": "/nowhere/at/all"}, "cannot be read"),
    ],
)
def test_settings_that_cannot_work_are_named(options: dict[str, Any], message: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        create_backend(mha_pool(), options)


def test_a_path_is_a_file_store_and_sglangs_own_settings_are_left_alone() -> None:
    def parse(**options: Any) -> StorageOptions:
        return StorageOptions.parse({**OPTIONS, "prefetch_threshold": 64, "allocator": "shm", **options})

    assert parse(storage="/var/kv", capacity="1GiB").address == "file:/var/kv?capacity=1GiB"
    assert parse(storage="file:/var/kv?fsync=batch", capacity=4096).address == "file:/var/kv?fsync=batch&capacity=4096"
    assert parse(storage="memory:").address == "memory:"
