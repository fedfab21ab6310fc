"""NVIDIA's driver through ctypes: one library a process, shared with whatever runtime the engine has loaded."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p

from kvhoist.errors import ConfigError, DeviceError

_LIBRARY = "libcuda.so.1"

_OPTIONAL = ("cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync")
"""Functions that older drivers lack; the least driver version that has them is 570 (CUDA 12.8)."""

STREAM_NON_BLOCKING = 1
EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2
HOST_REGISTER_PORTABLE = 1
HOST_REGISTER_DEVICEMAP = 2
_CAPTURE_RELAXED = 2
_ALREADY = contextlib.nullcontext()
_NOT_READY = 600
_NAME_BYTES = 256
_MAX_PITCH, _MULTIPROCESSORS, _MAJOR, _MINOR = 11, 16, 75, 76


class MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: sources are read in stream order, the driver finds out where memory is."""

    _fields_ = (
        ("source_access_order", c_int),
        ("source_location", c_int * 2),
        ("destination_location", c_int * 2),
        ("flags", ctypes.c_uint),
    )


STREAM_ORDERED = MemcpyAttributes(source_access_order=1)


class CudaDriver:
    """The driver and the primary context of one GPU, the one that torch and the CUDA runtime use. Thread-safe.

    Raises ConfigError where there is no NVIDIA driver or no such device.
    """

    def __init__(self, index: int) -> None:
        try:
            self.library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise ConfigError(
                "no NVIDIA driver is installed", got=str(error), expected=_LIBRARY, remedy="Keep KV tensors on the CPU."
            ) from error
        self._declare()
        self._local = threading.local()
        self.spare_events: list[int] = []
        self.check(self.library.cuInit(0), "starting the driver")
        device, context, version = c_int(), c_void_p(), c_int()
        self.check(self.library.cuDeviceGet(byref(device), index), f"finding device {index}")
        self.check(self.library.cuDevicePrimaryCtxRetain(byref(context), device), f"opening device {index}")
        self.check(self.library.cuDriverGetVersion(byref(version)), "asking for the driver's version")
        self._context = context.value
        self._device = device.value
        self.version = version.value
        self.name = self._name()
        self.has_batch_copies = hasattr(self.library, "cuMemcpyBatchAsync")
        self.compute_capability = (self._attribute(_MAJOR), self._attribute(_MINOR))
        self.num_multiprocessors = self._attribute(_MULTIPROCESSORS)
        self.max_pitch_bytes = self._attribute(_MAX_PITCH)

    def current(self) -> AbstractContextManager[None]:
        """Make the context current for the calling thread, and what was current before it again at the end."""
        return _ALREADY if getattr(self._local, "ours", False) else self._pushed()

    @contextlib.contextmanager
    def _pushed(self) -> Iterator[None]:
        before = c_void_p()
        self.check(self.library.cuCtxGetCurrent(byref(before)), "asking for the current context")
        if before.value == self._context:
            yield
            return
        self.check(self.library.cuCtxPushCurrent_v2(self._context), "making the device current")
        try:
            yield
        finally:
            popped = c_void_p()
            self.library.cuCtxPopCurrent_v2(byref(popped))

    def adopt_thread(self) -> None:
        """Make the context current for the rest of the calling thread's life, one that kvhoist started. What it calls
        does no harm to CUDA graphs that other threads capture meanwhile."""
        self.check(self.library.cuCtxSetCurrent(self._context), "making the device current")
        mode = c_int(_CAPTURE_RELAXED)
        self.check(self.library.cuThreadExchangeStreamCaptureMode(byref(mode)), "setting the capture mode")
        self._local.ours = True

    def release(self, function: str, handle: int | None) -> None:
        """Give something back, in whatever thread the last reference to it went. At the end of a process the driver may
        be gone: what it answers then does not matter."""
        with contextlib.suppress(DeviceError), self.current():
            getattr(self.library, function)(handle)

    def check(self, code: int, doing: str) -> None:
        """Raise DeviceError, naming the code and what was being done, unless `code` is success."""
        if code:
            raise DeviceError(f"CUDA failed in {doing}", got=self.error_name(code))

    def is_ready(self, code: int, doing: str) -> bool:
        """As `check`, for queries: False for `not ready`."""
        if code == _NOT_READY:
            return False
        self.check(code, doing)
        return True

    def error_name(self, code: int) -> str:
        name, text = c_char_p(), c_char_p()
        self.library.cuGetErrorName(code, byref(name))
        self.library.cuGetErrorString(code, byref(text))
        return f"{(name.value or b'unknown error').decode()} ({code}): {(text.value or b'').decode()}"

    def _name(self) -> str:
        text = ctypes.create_string_buffer(_NAME_BYTES)
        self.check(self.library.cuDeviceGetName(text, _NAME_BYTES, self._device), "asking for the device's name")
        return text.value.decode(errors="replace")

    def _attribute(self, which: int) -> int:
        value = c_int()
        self.check(self.library.cuDeviceGetAttribute(byref(value), which, self._device), "asking for an attribute")
        return value.value

    def _declare(self) -> None:
        """Tell ctypes the arguments of what is called with plain ints: it would cut addresses to 32 bits."""
        p, n, i = c_void_p, c_size_t, c_int
        signatures = {
            "cuCtxPushCurrent_v2": (p,),
            "cuCtxSetCurrent": (p,),
            "cuDevicePrimaryCtxRetain": (p, i),
            "cuDeviceGetName": (p, i, i),
            "cuEventDestroy_v2": (p,),
            "cuEventQuery": (p,),
            "cuEventRecord": (p, p),
            "cuEventSynchronize": (p,),
            "cuLaunchKernel": (p, i, i, i, i, i, i, i, p, p, p),
            "cuMemAlloc_v2": (p, n),
            "cuMemFree_v2": (p,),
            "cuMemGetAddressRange_v2": (p, p, p),
            "cuMemHostGetDevicePointer_v2": (p, p, i),
            "cuMemHostRegister_v2": (p, n, i),
            "cuMemHostUnregister": (p,),
            "cuMemcpyAsync": (p, p, n, p),
            "cuMemcpyHtoD_v2": (p, p, n),
            "cuMemcpy2DAsync_v2": (p, p),
            "cuMemcpy3DBatchAsync": (n, p, p, ctypes.c_ulonglong, p),
            "cuMemcpyBatchAsync": (p, p, p, n, p, p, n, p, p),
            "cuModuleGetFunction": (p, p, c_char_p),
            "cuModuleLoadData": (p, c_char_p),
            "cuModuleUnload": (p,),
            "cuStreamDestroy_v2": (p,),
            "cuStreamSynchronize": (p,),
            "cuStreamWaitEvent": (p, p, i),
        }
        for name, types in signatures.items():
            function = getattr(self.library, name, None)
            if function is None and name not in _OPTIONAL:
                raise ConfigError("the NVIDIA driver is too old", got=f"one without {name}", expected="CUDA 11")
            if function is not None:
                function.argtypes = types
