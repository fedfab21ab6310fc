"""docs/engines.md and the code say the same."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from kvhoist.adapters.vllm.counts import GAUGES, LATE
from kvhoist.adapters.vllm.metrics import _COUNTERS, _PREFIX
from kvhoist.adapters.vllm.options import ConnectorOptions
from kvhoist.control.explain import MissKind
from kvhoist.geometry import CacheGeometry
from kvhoist.units import parse_bytes

TEXT = (Path(__file__).parents[3] / "docs/engines.md").read_text()


def section(title: str) -> str:
    """Return what stands between a heading and the next of the same level."""
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^\1 |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found is not None, f"there is no section {title!r}"
    return found.group(2)


def rows(text: str) -> dict[str, list[str]]:
    """Return the rows of the tables in `text`, cells by the first, whose backticks are taken off."""
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_every_setting_has_its_row_and_its_default() -> None:
    documented = rows(section("Settings"))
    settings = {field.name: field for field in fields(ConnectorOptions)}
    assert [name for name in documented if name not in ("setting", "---")] == list(settings)
    for name, field in settings.items():
        default = documented[name][0].strip("`")
        assert (default == "required") == (field.default is MISSING), name
        if default != "required":
            shown = json.loads(default)
            assert (parse_bytes(shown, name=name) if name.endswith("_bytes") else shown) == field.default, name


def test_every_metric_has_its_row_and_its_label() -> None:
    documented = rows(section("Metrics"))
    metrics = {name: label for name, (label, _) in _COUNTERS.items()} | dict.fromkeys(GAUGES)
    assert set(documented) - {"metric", "---"} == {f"{_PREFIX}{name}" for name in metrics}
    for name, label in metrics.items():
        assert documented[f"{_PREFIX}{name}"][0].startswith(f"`{label}`" if label else ""), name


def test_every_reason_of_a_miss_is_explained_and_no_other() -> None:
    documented = set(rows(section("Why was this not a hit?"))) - {"reason", "---"}
    kinds = {str(kind) for kind in MissKind} | {LATE}
    # What vLLM's requests cannot come to: pages that the policy leaves out have been seen nowhere, storage's losses are
    # look-ups that find nothing, and other namespaces are told of in the log.
    assert documented == kinds - {"not_stored", "dropped", "other_namespace"}


def test_the_flag_can_be_copied() -> None:
    (command,) = re.findall(r"vllm serve MODEL --kv-transfer-config '([^']*)'", TEXT)
    config = json.loads(command)
    module = __import__(config["kv_connector_module_path"], fromlist=[config["kv_connector"]])
    assert isinstance(getattr(module, config["kv_connector"]), type)
    options = ConnectorOptions.parse(config["kv_connector_extra_config"])
    assert options.host_bytes == 64 << 30
    assert config["kv_role"] == "kv_both"


@pytest.mark.parametrize(
    ("model", "geometry", "ranks"),
    [
        ("8B", CacheGeometry.attention(32, k_row_bytes=2048, v_row_bytes=2048, page_tokens=64), (1,)),
        ("DeepSeek-V3", CacheGeometry.latent(61, row_bytes=1152, page_tokens=64), (1, 8)),
    ],
)
def test_the_sizes_are_those_of_the_geometry(model: str, geometry: Any, ranks: tuple[int, ...]) -> None:
    line = next(line for line in section("Sizing").splitlines() if line.startswith(f"| {model}"))
    group = geometry.groups[0]
    assert f"{group.page_bytes // 64:,}" in line
    for number in ranks:
        num_pages = (64 << 30) // number // group.page_pitch_bytes
        assert f"{num_pages * 64:,}" in line


def test_what_it_migrates_to_are_settings_that_there_are() -> None:
    lines = [line for line in section("Coming from something else").splitlines() if line.startswith("| ")]
    here = [line.strip("| ").split(" | ")[-1] for line in lines]
    known = {field.name for field in fields(ConnectorOptions)}
    set_here = {name for cell in here for name in re.findall(r'"([a-z_]+)": ', cell)} - {"kv_connector"}
    assert set_here <= known
    named = {name for cell in here for name in re.findall(r"`([a-z_]+)`", cell)}
    assert named - known <= {"lru", "slru", "lfu", "arc", "recompute", "kv_connector_extra_config"} | {
        *("kv_connector_module_path", "page_first_direct", "kv_producer", "kv_consumer")
    }
    assert set_here | named >= {"host_bytes", "storage", "blocks_per_page", "eviction", "write_policy", "layerwise"}


def sources(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in folder.rglob("*.py"))


def test_the_names_of_vllms_own_settings_are_vllms() -> None:
    import vllm

    root = Path(vllm.__file__).parent
    text = "\n".join(
        [
            sources(root / "v1/kv_offload"),
            sources(root / "distributed/kv_transfer/kv_connector/v1/offloading"),
            *(path.read_text() for path in (root / "distributed/kv_transfer/kv_connector/v1").glob("*offload*.py")),
            (root / "engine/arg_utils.py").read_text(),
            (root / "config/kv_transfer.py").read_text(),
            (root / "envs.py").read_text(),
        ]
    )
    left = [line.split(" | ")[0] for line in section("vLLM's own offloading").splitlines() if line[:3] == "| `"]
    names = {name for cell in left for name in re.findall(r"`\"?(-{0,2}[a-zA-Z][\w-]*)", cell)}
    newer = {"TieringOffloadingSpec", "blocks_per_chunk", "offload_prompt_only", "secondary_tiers", "backpressure"}
    newer |= {"canonical_layout", "self_describing_kv_events", "cache_policy_module_path", "kv_offload_backend"}
    newer |= {"disk_path", "disk_capacity_bytes", "disk_buffer_slots", "use_page_cache", "obj", "p2p", "kvcr"}
    missing = {name for name in names if name not in text}
    assert missing <= newer if not (root / "v1/kv_offload/tiering").is_dir() else not missing
