"""NVIDIA's driver through ctypes: one library a process, shared with whatever runtime the engine has loaded."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p

from kvhoist.errors import ConfigError
from kvhoist.platform.base import Rects
from kvhoist.platform.cuda_rects import enqueue_rects
from kvhoist.platform.gpu_driver import GpuDriver
from kvhoist.system_files import text_of

_LIBRARY = "libcuda.so.1"
_DRIVER_FILE, _RELEASE = "/proc/driver/nvidia/version", re.compile(r"\s(\d{3}\.[\d.]*\d)\s")

_FUNCTIONS = {
    "allocate": "cuMemAlloc_v2",
    "allocation": "cuMemGetAddressRange_v2",
    "capture_mode": "cuThreadExchangeStreamCaptureMode",
    "context_current": "cuCtxGetCurrent",
    "context_pop": "cuCtxPopCurrent_v2",
    "context_push": "cuCtxPushCurrent_v2",
    "context_retain": "cuDevicePrimaryCtxRetain",
    "context_set": "cuCtxSetCurrent",
    "copy": "cuMemcpyAsync",
    "copy_batch": "cuMemcpyBatchAsync",
    "copy_rect": "cuMemcpy2DAsync_v2",
    "copy_rects": "cuMemcpy3DBatchAsync",
    "device_attribute": "cuDeviceGetAttribute",
    "device_name": "cuDeviceGetName",
    "error_name": "cuGetErrorName",
    "error_text": "cuGetErrorString",
    "event_create": "cuEventCreate",
    "event_destroy": "cuEventDestroy_v2",
    "event_elapsed": "cuEventElapsedTime",
    "event_query": "cuEventQuery",
    "event_record": "cuEventRecord",
    "event_synchronize": "cuEventSynchronize",
    "find_device": "cuDeviceGet",
    "free": "cuMemFree_v2",
    "host_address": "cuMemHostGetDevicePointer_v2",
    "init": "cuInit",
    "launch": "cuLaunchKernel",
    "module_function": "cuModuleGetFunction",
    "module_load": "cuModuleLoadData",
    "module_unload": "cuModuleUnload",
    "register": "cuMemHostRegister_v2",
    "stream_create": "cuStreamCreateWithPriority",
    "stream_destroy": "cuStreamDestroy_v2",
    "stream_priorities": "cuCtxGetStreamPriorityRange",
    "stream_synchronize": "cuStreamSynchronize",
    "stream_wait": "cuStreamWaitEvent",
    "unregister": "cuMemHostUnregister",
    "version": "cuDriverGetVersion",
    "write": "cuMemcpyHtoD_v2",
}

_OTHERS = {
    "context_current": (c_void_p,),
    "context_pop": (c_void_p,),
    "context_push": (c_void_p,),
    "context_retain": (c_void_p, c_int),
    "context_set": (c_void_p,),
    "copy": (c_void_p, c_void_p, c_size_t, c_void_p),
    "copy_rect": (c_void_p, c_void_p),
    "copy_rects": (c_size_t, c_void_p, c_void_p, ctypes.c_ulonglong, c_void_p),
    "error_name": (c_int, c_void_p),
    "error_text": (c_int, c_void_p),
}

_OPTIONAL = ("copy_batch", "copy_rects")
"""Functions that older drivers lack; the least driver version that has them is 570 (CUDA 12.8)."""

_MAX_PITCH, _MULTIPROCESSORS, _MAJOR, _MINOR = 11, 16, 75, 76


class _MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: sources are read in stream order, the driver finds out where memory is."""

    _fields_ = (
        ("source_access_order", c_int),
        ("source_location", c_int * 2),
        ("destination_location", c_int * 2),
        ("flags", ctypes.c_uint),
    )


_STREAM_ORDERED = _MemcpyAttributes(source_access_order=1)


class CudaDriver(GpuDriver):
    """The driver and the primary context of one GPU, the one that torch and the CUDA runtime use.

    Raises ConfigError where there is no NVIDIA driver or no such device.
    """

    vendor = "CUDA"

    def __init__(self, index: int) -> None:
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise ConfigError(
                "no NVIDIA driver is installed",
                got=str(error),
                expected=_LIBRARY,
                remedy="Keep KV tensors on the CPU; for a GPU of AMD's set KVHOIST_PLATFORM=rocm.",
            ) from error
        super().__init__(library, _FUNCTIONS, others=_OTHERS, optional=_OPTIONAL, least="CUDA 11")
        device, context, version = c_int(), c_void_p(), c_int()
        self.check(self.call.find_device(byref(device), index), f"finding device {index}")
        self.check(self.call.context_retain(byref(context), device), f"opening device {index}")
        self.check(self.call.version(byref(version)), "asking for the driver's version")
        self._context = context.value
        self.version = version.value
        self.name = self._device_name(device.value)
        self.has_batch_copies = hasattr(self.call, "copy_batch")
        self.compute_capability = (self._attribute(_MAJOR, device.value), self._attribute(_MINOR, device.value))
        self.num_multiprocessors = self._attribute(_MULTIPROCESSORS, device.value)
        self.max_pitch_bytes = self._attribute(_MAX_PITCH, device.value)
        self._attribute_index, self._failed = c_size_t(0), c_size_t(0)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        before = c_void_p()
        self.check(self.call.context_current(byref(before)), "asking for the current context")
        if before.value == self._context:
            yield
            return
        self.check(self.call.context_push(self._context), "making the device current")
        try:
            yield
        finally:
            popped = c_void_p()
            self.call.context_pop(byref(popped))

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> int:
        code: int = self.call.copy(destination, source, num_bytes, stream)
        return code

    def copy_batch(self, destinations: int, sources: int, lengths: int, count: int, stream: int) -> bool:
        code = self.call.copy_batch(
            destinations,
            sources,
            lengths,
            count,
            byref(_STREAM_ORDERED),
            byref(self._attribute_index),
            1,
            byref(self._failed),
            stream,
        )
        if code:
            self.check(code, f"copying a batch of {count} (entry {self._failed.value})")
        return True

    def copy_rects(self, rects: Rects, stream: int) -> None:
        enqueue_rects(self, rects, stream)

    def error_name(self, code: int) -> str:
        name, text = c_char_p(), c_char_p()
        self.call.error_name(code, byref(name))
        self.call.error_text(code, byref(text))
        return f"{(name.value or b'unknown error').decode()} ({code}): {(text.value or b'').decode()}"

    def releases(self) -> str:
        found = _RELEASE.search(text_of(_DRIVER_FILE))
        return f"{found[1] if found else 'unknown'}, CUDA {self.version // 1000}.{self.version % 1000 // 10}"

    def _make_current(self) -> None:
        self.check(self.call.context_set(self._context), "making the device current")
