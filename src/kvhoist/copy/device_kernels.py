"""The relayout kernels of one device, and the buffers through which ids reach them."""

from __future__ import annotations

from types import TracebackType

from kvhoist.copy.code_cache import CodeCache
from kvhoist.copy.id_buffers import IdBuffers
from kvhoist.copy.jit import compile_kernels
from kvhoist.copy.relayout import NAME, SOURCE
from kvhoist.copy.rounds import DEFINES
from kvhoist.platform.base import Platform


class DeviceKernels:
    """Kernels and id buffers for all copies of a rank. A context manager, whose end unregisters host memory; nothing
    may be under way then. Raises as `compile_kernels` does."""

    def __init__(self, platform: Platform) -> None:
        compiled = compile_kernels(
            SOURCE.read_text(),
            name=NAME,
            compute_capability=platform.capabilities.compute_capability,
            gpu_arch=platform.capabilities.gpu_arch,
            defines=DEFINES,
            cache=CodeCache(None),
        )
        self.module = platform.load_module(compiled.image)
        self.ids = IdBuffers(platform, self.module)

    def __enter__(self) -> DeviceKernels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ids.close()
