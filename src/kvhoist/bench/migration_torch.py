"""The model's part in `kvhoist.bench.migration`: products by torch, which must be one for ROCm."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvhoist.errors import ConfigError

_WIDTH, _PRODUCTS = 4096, 4


def check_hip() -> str:
    """Return the release of HIP that torch was built with. Raises ConfigError where it was not built for ROCm."""
    release = torch.version.hip
    if not release:
        raise ConfigError(
            "torch is not one for ROCm",
            got=f"torch {torch.__version__}",
            expected="one built with HIP",
            remedy="Install torch from its ROCm wheels (https://pytorch.org), or use --simulate.",
        )
    return str(release)


def products(device: int, stream: int) -> Callable[[], None]:
    """Return what enqueues 4 products of 4096 x 4096 matrices in bf16 into the runtime's stream `stream`, which must
    live as long."""
    queue = torch.cuda.ExternalStream(stream, device=f"cuda:{device}")
    options = {"dtype": torch.bfloat16, "device": f"cuda:{device}"}
    a, b = (torch.randn(_WIDTH, _WIDTH, **options) for _ in range(2))
    out = torch.empty(_WIDTH, _WIDTH, **options)
    torch.cuda.synchronize(device)

    def enqueue() -> None:
        with torch.cuda.stream(queue):
            for _ in range(_PRODUCTS):
                torch.mm(a, b, out=out)

    return enqueue
