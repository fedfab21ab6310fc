from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhoist.control.namespace import Namespace, ParallelLayout, nearest_difference
from kvhoist.errors import ConfigError
from kvhoist.geometry import CacheGeometry
from kvhoist.layout import HostOrder

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "eos_token_id": [1, 2],
    "sliding_window": None,
    "_name_or_path": "/some/folder",
    "transformers_version": "5.24.0",
}


def geometry(layers: Any = 2, k: int = 128, v: int = 128, page_tokens: int = 16, **more: Any) -> CacheGeometry:
    return CacheGeometry.attention(layers, k_row_bytes=k, v_row_bytes=v, page_tokens=page_tokens, **more)


def arguments(**changes: Any) -> dict[str, Any]:
    base = {
        "model_id": "some/model",
        "weights_id": "checkpoint-v1:00",
        "geometry": geometry(),
        "config": CONFIG,
        "kv_dtype": "bfloat16",
    }
    return {**base, **changes}


def create(**changes: Any) -> Namespace:
    return Namespace.create(**arguments(**changes))


CHANGES: list[tuple[dict[str, Any], list[str]]] = [
    ({"model_id": "other"}, ["model_id"]),
    ({"weights_id": "checkpoint-v1:01"}, ["weights_id"]),
    ({"kv_dtype": "float16"}, ["kv_dtype"]),
    ({"kv_scales": "calibration-1"}, ["kv_scales"]),
    ({"lora": "adapter:77"}, ["lora"]),
    ({"tenant": "acme"}, ["tenant"]),
    ({"block_order": "vllm-LBHNC"}, ["block_order"]),
    ({"page_order": HostOrder.PAGE_FIRST}, ["page_order"]),
    ({"compute": {"attention": "eager"}}, ["compute", "compute.attention"]),
    ({"parallel": ParallelLayout(tensor=2)}, ["parallel.tensor"]),
    ({"parallel": ParallelLayout(pipeline=2)}, ["parallel.pipeline"]),
    ({"parallel": ParallelLayout(context=2)}, ["parallel.context"]),
    ({"parallel": ParallelLayout(context_interleave_tokens=16)}, ["parallel.context_interleave_tokens"]),
    ({"config": {**CONFIG, "rope_theta": 500000.0}}, ["config.rope_theta"]),
    ({"config": {**CONFIG, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}}, ["config.rope_scaling.factor"]),
    ({"config": {**CONFIG, "eos_token_id": [2, 1]}}, ["config.eos_token_id"]),
    ({"config": {**CONFIG, "sliding_window": 0}}, ["config.sliding_window"]),
    ({"config": {**CONFIG, "unheard_of": 1}}, ["config.unheard_of"]),
    ({"config": {k: v for k, v in CONFIG.items() if k != "sliding_window"}}, ["config.sliding_window"]),
    ({"geometry": geometry(page_tokens=32)}, ["geometry.0.page_tokens"]),
    ({"geometry": geometry(k=256)}, ["geometry.0.component.k.row_bytes"]),
    ({"geometry": geometry(layers=3)}, ["geometry.0.component.k.layers", "geometry.0.component.v.layers"]),
]


@pytest.mark.parametrize(
    ("changes", "names"), CHANGES, ids=[names[0] + f"-{i}" for i, (_, names) in enumerate(CHANGES)]
)
def test_any_change_gives_another_digest_and_is_named(changes: dict[str, Any], names: list[str]) -> None:
    ours, theirs = create(), create(**changes)
    assert ours.digest != theirs.digest
    assert ours.differs_from(theirs) == theirs.differs_from(ours) == names


def test_all_changes_give_different_digests() -> None:
    digests = {create(**changes).digest for changes, _ in CHANGES} | {create().digest}
    assert len(digests) == len(CHANGES) + 1


def test_geometry_of_other_components_differs() -> None:
    with_scales = create(geometry=geometry(scale_row_bytes=4))
    latent = create(geometry=CacheGeometry.latent(2, row_bytes=256, page_tokens=16))
    assert "geometry.0.components" in create().differs_from(with_scales)
    assert "geometry.0.components" in create().differs_from(latent)


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {**CONFIG, "_name_or_path": "elsewhere", "transformers_version": "6", "use_cache": False}},
        {"config": {**CONFIG, "_commit_hash": "abc", "auto_map": {"AutoModel": "x--y.Z"}}},
        {"config": dict(reversed(CONFIG.items()))},
        {"config": {**CONFIG, "eos_token_id": (1, 2)}},
        {"kv_dtype": "torch.bfloat16"},
        {"geometry": geometry(blocks_per_page=4)},
        {"parallel": ParallelLayout()},
        {"compute": {}},
    ],
)
def test_what_does_not_change_the_bytes_does_not_change_the_digest(changes: dict[str, Any]) -> None:
    assert create(**changes) == create()
    assert create(**changes).digest == create().digest


def test_volatile_fields_are_left_out_at_every_depth() -> None:
    nested = [{"text_config": {"_name_or_path": p, "x": 1}, "list": [{"_name_or_path": p}]} for p in "ab"]
    assert create(config=nested[0]).digest == create(config=nested[1]).digest


def test_no_config_differs_from_an_empty_one() -> None:
    assert create(config=None).differs_from(create(config={})) == ["config"]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.~", max_size=3), inner, max_size=3),
    max_leaves=6,
)
configs = st.dictionaries(st.text("ab.~", max_size=3), plain, max_size=4)


@given(configs, configs)
def test_two_configs_share_a_digest_only_where_they_are_the_same_json(a: dict[str, Any], b: dict[str, Any]) -> None:
    same = json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    ours, theirs = create(config=a), create(config=b)
    assert (ours.digest == theirs.digest) == same
    assert (ours.differs_from(theirs) == []) == same


def test_dots_in_names_cannot_imitate_nesting() -> None:
    assert create(config={"a.b": 1}).digest != create(config={"a": {"b": 1}}).digest
    assert create(config={"a~1b": 1}).digest != create(config={"a.b": 1}).digest


def test_a_long_value_is_hashed_and_its_field_still_named() -> None:
    ours = create(config={"table": list(range(500)), "x": 1})
    theirs = create(config={"table": [*range(499), 0], "x": 1})
    assert ours.differs_from(theirs) == ["config.table"]
    assert all(len(value) <= 256 for _, value in ours.fields)
    literal = create(config={"table": ours.field_dict()["config.table"], "x": 1})
    assert literal.digest != ours.digest


def test_equal_inputs_give_the_same_digest_in_every_process() -> None:
    code = (
        "from tests_unit_namespace import create\n"
        "print(create(config={'set': {'a', 'b', 'c', 'd'}, 'x': {'y': 1}}, tenant='acme').digest.hex())"
    )
    loader = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('tests_unit_namespace', {__file__!r})\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['tests_unit_namespace'] = module\n"
        "spec.loader.exec_module(module)\n"
    )
    digests = set()
    for seed in ("0", "1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", loader + code], env=env, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1
    assert digests == {create(config={"set": {"d", "c", "b", "a"}, "x": {"y": 1}}, tenant="acme").digest.hex()}


def test_a_tenant_cannot_be_read_from_the_fields() -> None:
    stored = json.dumps([create(tenant="acme").field_dict(), create(tenant="acme", tenant_secret=b"key").field_dict()])
    assert "acme" not in stored


def test_tenants_and_their_secrets_are_kept_apart() -> None:
    """Field report 4: a tenant that is missing from the key shares pages with another."""
    kinds = [("", None), ("acme", None), ("acme ", None), ("acme", b"1"), ("acme", b"2"), ("other", b"1")]
    assert len({create(tenant=tenant, tenant_secret=secret).digest for tenant, secret in kinds}) == len(kinds)


def test_stored_fields_give_the_namespace_back() -> None:
    ours = create(tenant="acme")
    again = Namespace.from_fields(json.loads(json.dumps(ours.field_dict())))
    assert again == ours
    assert again.digest == ours.digest
    assert len(ours.digest) == 32


def test_the_order_of_fields_does_not_matter_and_doubled_names_are_refused() -> None:
    assert Namespace((("b", "2"), ("a", "1"))).digest == Namespace((("a", "1"), ("b", "2"))).digest
    with pytest.raises(ConfigError, match="different names"):
        Namespace((("a", "1"), ("a", "2")))
    with pytest.raises(ConfigError, match="different names"):
        Namespace(())


@pytest.mark.parametrize("name", ["model_id", "weights_id", "kv_dtype", "kv_scales", "lora", "block_order"])
def test_an_empty_identity_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is empty"):
        create(**{name: ""})


def test_auto_names_no_dtype() -> None:
    with pytest.raises(ConfigError, match="kv_dtype_of"):
        create(kv_dtype="auto")


@pytest.mark.parametrize("value", [object(), {1.5: 2}, b"bytes", [object()], {"a", 1}])
def test_a_config_that_is_no_plain_data_is_refused_by_field(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"config\.odd"):
        create(config={"odd": value})


@pytest.mark.parametrize("value", [0, -1, True, 1.0, 1 << 30])
def test_a_parallel_layout_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="tensor is out of range"):
        ParallelLayout(tensor=value)


def test_what_a_stranger_noted_is_told_as_text_that_no_terminal_obeys() -> None:
    ours = create().field_dict()
    told = nearest_difference(ours, [ours | {"model_id": "\x1b[2J\u202e", "\x1b]0;x\x07": "y\n"}])
    assert told is not None
    assert told.isprintable()
    assert "model_id" in told
