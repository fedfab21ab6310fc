"""What docs/sglang.md tells people to write is what the backend takes."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang_rig import mha_pool, storage_config
from sglang_standin import RELEASE, ROOT

from kvhoist.adapters.sglang import KvhoistStorage
from kvhoist.adapters.sglang.options import StorageOptions

PAGE = (ROOT / "docs/sglang.md").read_text()


@pytest.mark.parametrize("document", ["sglang.md", "engines.md"])
def test_the_command_line_makes_a_backend(document: str, tmp_path: Path) -> None:
    (line,) = [x for x in (ROOT / "docs" / document).read_text().splitlines() if x.startswith("python -m sglang.")]
    words = shlex.split(line)
    assert words[words.index("--hicache-storage-backend") + 1] == "dynamic"
    options = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
    assert options.pop("storage").startswith("file:/")
    config = storage_config({"storage": f"file:{tmp_path}/kv"})
    config.extra_config = {**options, "storage": f"file:{tmp_path}/kv"}
    made = StorageBackendFactory.create_backend("dynamic", config, mha_pool())
    made.close()
    assert type(made) is KvhoistStorage


def test_every_setting_is_described_with_its_default() -> None:
    table = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", PAGE, re.MULTILINE))
    default = {
        f.name: "required" if f.default is MISSING else f"`{json.dumps(f.default)}`" for f in fields(StorageOptions)
    }
    assert table == default


def test_the_release_is_the_one_that_is_tested() -> None:
    assert f"SGLang {RELEASE}" in PAGE
    assert f"| SGLang {RELEASE} |" in (ROOT / "README.md").read_text()
