"""Kernels like a model's, captured in a graph: products that keep the multiprocessors busy, and ones that keep the
memory busy. The only module of the benchmarks, with `ttft`, that needs torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

_WINDOW_S = 0.06
"""A window spans ten copies of 256 MiB or so."""


class GraphCompute:
    """Replays of one captured graph: as many as fill a window."""

    def __init__(self, device: int, work: Callable[[], object]) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._graph = torch.cuda.CUDAGraph()
            self._points = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            with torch.cuda.stream(self._stream):
                work()
                self._stream.synchronize()
                with torch.cuda.graph(self._graph, stream=self._stream):
                    work()
            self._replays = 1
            self.start()
            self.seconds()
            self.start()
            self._replays = max(2, round(_WINDOW_S / self.seconds()))

    def start(self) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._points[0].record()
            for _ in range(self._replays):
                self._graph.replay()
            self._points[1].record()

    def done(self) -> bool:
        return bool(self._points[1].query())

    def seconds(self) -> float:
        self._points[1].synchronize()
        return float(self._points[0].elapsed_time(self._points[1])) * 1e-3


def gemm(device: int) -> GraphCompute:
    """Return 5 products of 8192 x 8192 matrices in bf16, as a prefill's."""
    options = {"dtype": torch.bfloat16, "device": f"cuda:{device}"}
    a, b = (torch.randn(8192, 8192, **options) for _ in range(2))
    out = torch.empty(8192, 8192, **options)

    def work() -> None:
        for _ in range(5):
            torch.mm(a, b, out=out)

    return GraphCompute(device, work)


def gemv(device: int) -> GraphCompute:
    """Return products of 64 matrices of 128 MiB with a vector, as the weights of a decode step."""
    options = {"dtype": torch.bfloat16, "device": f"cuda:{device}"}
    weights = [torch.randn(8192, 8192, **options) for _ in range(64)]
    vector, out = torch.randn(8192, **options), torch.empty(8192, **options)

    def work() -> None:
        for matrix in weights:
            torch.mv(matrix, vector, out=out)

    return GraphCompute(device, work)
