"""What a user can write into kv_connector_extra_config, and what is said to what cannot be."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kvhoist.adapters.vllm.connector import KvhoistConnector
from kvhoist.adapters.vllm.options import ConnectorOptions
from kvhoist.errors import ConfigError, KvhoistError, PolicyError


def parse(**settings: Any) -> ConnectorOptions:
    return ConnectorOptions.parse({"host_bytes": "1GiB", **settings})


def test_sizes_are_bytes() -> None:
    assert parse().host_bytes == 1 << 30
    assert parse(host_bytes=4096).host_bytes == 4096


def test_an_unknown_setting_is_named_with_what_may_be_meant() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting: hostbytes.*Did you mean 'host_bytes'\?"):
        ConnectorOptions.parse({"hostbytes": "1GiB"})
    with pytest.raises(ConfigError, match=r"unknown setting: 7, zzz"):
        ConnectorOptions.parse({7: "1GiB", "zzz": 1})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("theirs", "here"),
    [("cpu_bytes_to_use", "host_bytes"), ("chunk_size", "blocks_per_page"), ("local_disk", "storage")],
)
def test_what_other_connectors_call_a_setting_is_answered_with_our_name(theirs: str, here: str) -> None:
    with pytest.raises(ConfigError, match=f"Here it is {here}"):
        parse(**{theirs: 1})


def test_a_host_size_without_a_unit_is_asked_about() -> None:
    with pytest.raises(ConfigError, match='Write "64GiB"'):
        ConnectorOptions.parse({"host_bytes": 64})


def test_a_read_only_store_is_not_written_to() -> None:
    assert not parse().persists
    assert parse(storage="file:/x").persists
    assert not parse(storage="file:/x?read_only=true&capacity=1GiB").persists


def test_settings_are_refused_where_vllm_asks_about_cuda_graphs_before_it_loads_a_model() -> None:
    asks = KvhoistConnector.requires_piecewise_for_cudagraph
    assert asks({"host_bytes": "1GiB", "layerwise": True})
    assert not asks({"host_bytes": "1GiB"})
    with pytest.raises(ConfigError, match="lacks host_bytes"):
        asks({})
    assert not asks({"on_error": "disable"}), "the cache is off then, and the engine starts"


def test_the_host_tier_has_no_default_size() -> None:
    with pytest.raises(ConfigError, match="lacks host_bytes"):
        ConnectorOptions.parse({})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host_bytes", 0),
        ("host_bytes", -1),
        ("host_bytes", "many"),
        ("host_bytes", True),
        ("host_bytes", None),
        ("storage", 3),
        ("weights_id", 3),
        ("tenant", None),
        ("io_backend", None),
        ("blocks_per_page", 0),
        ("blocks_per_page", 1.5),
        ("blocks_per_page", "4"),
        ("write_policy", "write_back"),
        ("write_policy", "sometimes"),
        ("min_hits", 0),
        ("eviction", "lrux"),
        ("eviction", 3),
        ("layerwise", "yes"),
        ("debug_verify", 1),
        ("lookup_timeout_s", -1),
        ("prefetch_timeout_s", "soon"),
        ("drain_timeout_s", float("nan")),
        ("io_threads", 0),
        ("max_queued_pages", 0),
        ("block_quota", 0),
        ("block_quota", 1025),
        ("block_quota", "2"),
        ("history_pages", -1),
        ("on_error", "ignore"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(KvhoistError) as caught:
        parse(**{name: value})
    assert (
        name in str(caught.value)
        or name.replace("_", " ") in str(caught.value)
        or isinstance(caught.value, PolicyError)
    )


@pytest.mark.parametrize("name", ["lookup_timeout_s", "prefetch_timeout_s", "drain_timeout_s"])
@pytest.mark.parametrize("value", [float("inf"), 1e300, 10**400])
def test_times_are_what_the_clocks_can_count(name: str, value: Any) -> None:
    """Unbounded, a shutdown or a look-up would fail by overflow."""
    found = getattr(parse(**{name: value}), name)
    assert isinstance(found, float)
    assert time.monotonic() + found < threading.TIMEOUT_MAX
