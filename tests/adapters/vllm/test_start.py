"""What vLLM's settings must be for hits to be right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvhoist.adapters.vllm.options import ConnectorOptions
from kvhoist.adapters.vllm.start import check_engine
from kvhoist.errors import ConfigError


def vllm_config(*, v2: bool) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True, prefix_caching_hash_algo="sha256"),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        lora_config=None,
        use_v2_model_runner=v2,
    )


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("zeroing", [False, True])
def test_blocks_that_vllm_zeroes_before_an_offload_can_be_awaited_are_not_served(v2: bool, zeroing: bool) -> None:
    caches = SimpleNamespace(needs_kv_cache_zeroing=zeroing)
    options = ConnectorOptions(1 << 20)
    if v2 and zeroing:
        with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
            check_engine(vllm_config(v2=v2), caches, options)
    else:
        check_engine(vllm_config(v2=v2), caches, options)
